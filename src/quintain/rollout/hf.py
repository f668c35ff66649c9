"""The transformers engine: `model.generate`, for models that the native engine cannot run.

`generate` drives the model and its cache; tokens are drawn and rows are ended by the same code as in the native engine,
so the same seed gives the same tokens, and nothing is left for generation defaults to decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from quintain.adapters import unwrapped
from quintain.errors import ConfigError
from quintain.rollout.checks import check_prompts, validate_sampling
from quintain.rollout.completions import Completions, left_pad, sampling_mode
from quintain.types import Samples, SamplingParams


class TransformersEngine:
    """Samples through `model.generate`.

    Args:
        model: a causal language model, PEFT-wrapped or not; the engine reads its weights as they are at each call.
        tokenizer: needed only for stop strings.
    Raises:
        ConfigError: the model is an encoder-decoder, or has no `generate`.
    """

    name = "transformers"

    def __init__(self, model: nn.Module, tokenizer: Any = None) -> None:
        if not hasattr(model, "generate"):
            raise ConfigError(f"{type(model).__name__} has no generate(): load it with AutoModelForCausalLM.")
        if model.config.is_encoder_decoder:  # type: ignore[union-attr]
            raise ConfigError(f"{type(model).__name__} is an encoder-decoder; rollouts need a decoder-only model.")
        self.model: Any = model
        self.tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, generator: torch.Generator
    ) -> Samples:
        """Sample `num_generations` completions of each prompt."""
        validate_sampling(sampling)
        check_prompts(prompts, sampling, self.model)
        device = self.model.get_input_embeddings().weight.device
        completions = Completions(prompts, sampling, generator, self.tokenizer, device)
        prompt_ids, prompt_mask = left_pad(prompts, sampling.pad_token_id, device)
        with sampling_mode(self.model), no_generation_defaults(self.model):
            self.model.generate(
                input_ids=prompt_ids.repeat_interleave(sampling.num_generations, dim=0),
                attention_mask=prompt_mask.long().repeat_interleave(sampling.num_generations, dim=0),
                generation_config=_bare_config(max_new_tokens=sampling.max_completion_length),
                logits_processor=LogitsProcessorList([_Draw(completions)]),
                stopping_criteria=StoppingCriteriaList([_Ended(completions)]),
            )
        return completions.samples()


class _Draw(LogitsProcessor):
    """Draws the next tokens and leaves `generate` no other choice, so that its argmax takes them."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def __call__(self, input_ids: Int[Tensor, "rows tokens"], scores: Float[Tensor, "rows vocab"]) -> Tensor:
        rows = torch.arange(len(scores), device=scores.device)
        tokens = self._completions.append(scores, rows)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _Ended(StoppingCriteria):
    """Tells `generate` which rows have ended."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    def __call__(self, input_ids: Int[Tensor, "rows tokens"], scores: Any, **kwargs: Any) -> Bool[Tensor, " rows"]:
        return self._completions.ended


@contextmanager
def no_generation_defaults(model: Any) -> Iterator[None]:
    """Hide the model's generation config: `generate` fills every field that a caller left unset from it."""
    base = unwrapped(model)
    # PEFT's `generate` copies the wrapper's config, when it has one of its own, onto the model inside.
    owners = [owner for owner in (model, base) if "generation_config" in vars(owner)]
    defaults = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = _bare_config()
    try:
        yield
    finally:
        for owner, config in zip(owners, defaults, strict=True):
            owner.generation_config = config


def _bare_config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=False, num_beams=1, use_cache=True, **fields)
