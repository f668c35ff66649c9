"""The native engine: batched sampling through the model's own modules.

Each distinct prompt is read once, its cache is copied to the rows that continue it, and rows that have ended leave the
batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from quintain.errors import ConfigError
from quintain.rollout.cache import preallocated_cache
from quintain.rollout.checks import check_prompts, validate_sampling
from quintain.rollout.completions import Completions, left_pad, sampling_mode
from quintain.types import Samples, SamplingParams

COMPACT_FRACTION = 1 / 8
"""Part of the batch that must have ended before the rest is moved together: moving copies the whole cache."""


class NativeEngine:
    """Samples from any transformers decoder that keeps its past in the standard key-value cache.

    Args:
        model: a causal language model, PEFT-wrapped or not; the engine reads its weights as they are at each call.
        tokenizer: needed only for stop strings.
    Raises:
        ConfigError: the model keeps its past in some other way; the message says which.
    """

    name = "native"

    def __init__(self, model: nn.Module, tokenizer: Any = None) -> None:
        if reason := unsupported_by_native(model):
            raise ConfigError(f"the native rollout engine cannot run this model: {reason}. Use 'transformers'.")
        self.model = model
        self.tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, generator: torch.Generator
    ) -> Samples:
        """Sample `num_generations` completions of each prompt."""
        validate_sampling(sampling)
        check_prompts(prompts, sampling, self.model)
        device = _input_device(self.model)
        completions = Completions(prompts, sampling, generator, self.tokenizer, device)
        with sampling_mode(self.model):
            self._write(completions, prompts, sampling, device)
        return completions.samples()

    def _write(
        self,
        completions: Completions,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        device: torch.device,
    ) -> None:
        """Decode until every row has ended."""
        distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
        position = {prompt: index for index, prompt in enumerate(distinct)}
        sources = torch.tensor([position[tuple(prompt)] for prompt in prompts], device=device)
        sources = sources.repeat_interleave(sampling.num_generations)
        rows = torch.arange(len(sources), device=device)

        decoder = _Decoder(self.model, distinct, sampling, device)
        logits = decoder.read_prompts()[sources]
        decoder.select(sources)
        while True:
            tokens = completions.append(logits, rows)
            running = (~completions.ended[rows]).nonzero().squeeze(1)
            if not len(running):
                return
            if len(rows) - len(running) >= COMPACT_FRACTION * len(rows):
                decoder.select(running)
                rows, tokens = rows[running], tokens[running]
            logits = decoder.step(tokens)


class _Decoder:
    """The rows in the batch as the model sees them: cache, attention mask and next positions."""

    def __init__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], sampling: SamplingParams, device: torch.device
    ) -> None:
        self._model = model
        self._accepted = _forward_arguments(model)
        self._prompt_ids, prompt_mask = left_pad(prompts, sampling.pad_token_id, device)
        self._length = prompt_mask.shape[1]
        # The last token of a completion is never fed back.
        room = sampling.max_completion_length - 1
        self._cache = preallocated_cache(self._length + room)
        self._mask = nn.functional.pad(prompt_mask.long(), (0, room), value=1)
        self._positions = prompt_mask.sum(dim=1)

    def read_prompts(self) -> Float[Tensor, "prompts vocab"]:
        """Logits of the token after each prompt."""
        counted = self._mask[:, : self._length].cumsum(dim=1) - 1
        return self._forward(self._prompt_ids, counted.clamp(min=0))

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Feed each row its last token; returns logits of the one after it."""
        self._length += 1
        logits = self._forward(tokens[:, None], self._positions[:, None])
        self._positions = self._positions + 1
        return logits

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the given rows, in that order; a row may be given several times."""
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def _forward(self, token_ids: Int[Tensor, "rows tokens"], positions: Int[Tensor, "rows tokens"]) -> Tensor:
        arguments: dict[str, Any] = {
            "input_ids": token_ids,
            "attention_mask": self._mask[:, : self._length],
            "use_cache": True,
            _cache_argument(self._accepted): self._cache,
        }
        if "position_ids" in self._accepted:
            arguments["position_ids"] = positions
        if "logits_to_keep" in self._accepted:
            arguments["logits_to_keep"] = 1
        return self._model(**arguments).logits[:, -1]


def unsupported_by_native(model: nn.Module) -> str | None:
    """Why the native engine cannot run `model`, as a clause, or None if it can."""
    base = unwrapped(model)
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return "its adapter puts virtual tokens in front of the prompt"
    if base.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(base, "_is_stateful", False):
        return "its layers keep a recurrent state, not keys and values"
    if _cache_argument(_forward_arguments(base)) is None:
        return f"{type(base).__name__}.forward takes no cache"
    if any(hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh") for parameter in base.parameters()):
        return "its parameters are sharded, so all processes must decode in step"
    config = base.config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "attention_chunk_size", None
    ):
        return "it attends in chunks"
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    if others := layers - {DynamicLayer, DynamicSlidingWindowLayer}:
        return "its cache needs layers of type " + ", ".join(sorted(layer.__name__ for layer in others))
    return None


def unwrapped(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _forward_arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(unwrapped(model).forward).parameters)


def _cache_argument(accepted: set[str]) -> Any:
    """What the model calls its cache: transformers renamed `past_key_values` to `cache` within version 5."""
    return next((name for name in ("cache", "past_key_values") if name in accepted), None)


def _input_device(model: Any) -> torch.device:
    return model.get_input_embeddings().weight.device
