"""What can be refused before anything is sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quintain.errors import ConfigError, DataError
from quintain.types import SamplingParams


def validate_sampling(sampling: SamplingParams) -> None:
    """Check every field of `sampling` against its range.

    Raises:
        ConfigError: a field is outside its range, or two fields contradict each other.
    """
    if sampling.num_generations < 1:
        raise ConfigError(f"num_generations must be 1 or more: got {sampling.num_generations}.")
    if sampling.max_completion_length < 1:
        raise ConfigError(f"max_completion_length must be 1 or more: got {sampling.max_completion_length}.")
    if not 0 <= sampling.min_completion_length <= sampling.max_completion_length:
        raise ConfigError(
            "min_completion_length must be between 0 and max_completion_length: got "
            f"min_completion_length={sampling.min_completion_length}, "
            f"max_completion_length={sampling.max_completion_length}."
        )
    if not (sampling.temperature > 0 and math.isfinite(sampling.temperature)):
        raise ConfigError(
            f"temperature must be a finite number above 0: got {sampling.temperature}. Logits are divided by it; "
            "for the most likely token every time use top_k=1."
        )
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1 (1 turns it off): got {sampling.top_p}.")
    if sampling.top_k < 0:
        raise ConfigError(f"top_k must be 0 (off) or more: got {sampling.top_k}.")
    if not 0 <= sampling.min_p <= 1:
        raise ConfigError(f"min_p must be between 0 (off) and 1: got {sampling.min_p}.")
    if not (sampling.repetition_penalty > 0 and math.isfinite(sampling.repetition_penalty)):
        raise ConfigError(
            f"repetition_penalty must be a finite number above 0 (1 turns it off): got {sampling.repetition_penalty}."
        )
    _validate_stops(sampling)


def _validate_stops(sampling: SamplingParams) -> None:
    """Check the fields that end and pad a completion."""
    if sampling.pad_token_id < 0:
        raise ConfigError(
            f"pad_token_id must be a token id: got {sampling.pad_token_id}. Any id will do, the stop token's too."
        )
    negative = [token for token in sampling.stop_token_ids if token < 0]
    if negative:
        raise ConfigError(f"stop_token_ids must be token ids, 0 or more: got {negative[0]}.")
    if isinstance(sampling.stop_strings, str):
        raise ConfigError(f"stop_strings must be a sequence of strings: got the one string {sampling.stop_strings!r}.")
    if any(not isinstance(text, str) or not text for text in sampling.stop_strings):
        raise ConfigError(f"stop_strings must hold non-empty strings: got {list(sampling.stop_strings)!r}.")


def check_prompts(prompts: Sequence[Sequence[int]], sampling: SamplingParams, model: Any) -> None:
    """Refuse prompts that the model cannot continue.

    Raises:
        DataError: there is no prompt, one is empty, or one holds an id outside the model's vocabulary.
        ConfigError: a prompt and its completion would not fit the model's positions.
    """
    if not prompts:
        raise DataError("generate needs at least one prompt: got none.")
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"prompt {index} is empty: a completion needs at least one token to follow.")
        if max(prompt) >= vocabulary or min(prompt) < 0:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise DataError(
                f"prompt {index} holds token id {wrong}, but the model has {vocabulary} token embeddings. "
                "Use the tokenizer that belongs to the model."
            )
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = max(len(prompt) for prompt in prompts)
    if limit is not None and longest + sampling.max_completion_length > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and max_completion_length={sampling.max_completion_length} exceed the "
            f"{limit} positions of the model. Use max_completion_length={max(limit - longest, 0)} or less, or "
            "a smaller max_prompt_length."
        )
