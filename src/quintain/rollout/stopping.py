"""Where a completion ends: the stop set, the mask that follows from it, and stop strings.

This is the only place that compares sampled ids with stop tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from quintain.errors import ConfigError
from quintain.types import SamplingParams


def resolve_stop_token_ids(tokenizer: Any, model: Any, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """The whole stop set: end-of-sequence ids of the tokenizer and of the model's generation config, and `extra`.

    Nothing else is ever taken from a model's generation config. Chat models list their end-of-turn token there, often
    beside the tokenizer's end-of-sequence token.
    """
    generation_config = getattr(model, "generation_config", None)
    found: list[int] = []
    for ids in (getattr(tokenizer, "eos_token_id", None), getattr(generation_config, "eos_token_id", None), extra):
        if ids is not None:
            found.extend([ids] if isinstance(ids, int) else [int(token) for token in ids])
    return tuple(dict.fromkeys(found))


def completion_mask(
    completion_ids: Int[Tensor, "batch completion"],
    stop_token_ids: Sequence[int],
    lengths: Int[Tensor, " batch"] | None = None,
) -> tuple[Bool[Tensor, "batch completion"], Bool[Tensor, " batch"]]:
    """True up to and including each row's first stop token, and whether the row has one.

    Args:
        completion_ids: whatever follows the first stop token does not matter.
        lengths: tokens that were sampled at all, where rows are ragged; ids beyond them are padding.
    """
    is_stop = torch.isin(completion_ids, torch.tensor(stop_token_ids, dtype=torch.long, device=completion_ids.device))
    sampled = torch.ones_like(is_stop)
    if lengths is not None:
        sampled = torch.arange(completion_ids.shape[1], device=completion_ids.device) < lengths[:, None]
    is_stop = is_stop & sampled
    stops_before = is_stop.cumsum(dim=1) - is_stop.long()
    return sampled & (stops_before == 0), is_stop.any(dim=1)


class StopStrings:
    """Says whether a completion's last token completes one of the stop strings, wherever tokens begin and end.

    Only the last tokens are decoded: as many as the longest string has bytes, since a token spells at least one, and a
    few more, since tokenizers drop a leading space and cannot spell a character cut in half.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        if strings and tokenizer is None:
            raise ConfigError(f"stop_strings={list(strings)!r} need a tokenizer: give the engine one.")
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._window = max((len(text.encode()) for text in strings), default=0) + 4

    def completed(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of `token_ids` ends one of the strings that it did not end without its last token."""
        tail = list(token_ids[-self._window :])
        text = self._decode(tail)
        found = [(start, string) for string in self._strings if (start := text.rfind(string)) >= 0]
        if not found:
            return False
        before = self._decode(tail[:-1])
        return any(not before.startswith(string, start) for start, string in found)

    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens stay: a stop string may be one. Clean-up would move the boundaries between tokens.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class StopTracker:
    """Which rows of a batch have ended, why, and how long each has become."""

    def __init__(self, rows: int, sampling: SamplingParams, tokenizer: Any, device: torch.device) -> None:
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self._sampling = sampling
        self._stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        self._stop_strings = StopStrings(sampling.stop_strings, tokenizer) if sampling.stop_strings else None
        self._token_ids: list[list[int]] = [[] for _ in range(rows)] if sampling.stop_strings else []

    def update(self, rows: Int[Tensor, " batch"], tokens: Int[Tensor, " batch"]) -> None:
        """Append one token to each of `rows`; rows that have ended stay as they are."""
        running = ~self.ended[rows]
        rows, tokens = rows[running], tokens[running]
        self.lengths[rows] += 1
        stopped = torch.isin(tokens, self._stop_ids)
        if self._stop_strings is not None:
            stopped |= self._complete_a_string(self._stop_strings, rows, tokens)
        stopped &= self.lengths[rows] >= self._sampling.min_completion_length
        self.stopped[rows] = stopped
        self.ended[rows] = stopped | (self.lengths[rows] >= self._sampling.max_completion_length)

    def _complete_a_string(
        self, stop_strings: StopStrings, rows: Int[Tensor, " batch"], tokens: Int[Tensor, " batch"]
    ) -> Bool[Tensor, " batch"]:
        completed = []
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._token_ids[row].append(token)
            completed.append(stop_strings.completed(self._token_ids[row]))
        return torch.tensor(completed, dtype=torch.bool, device=rows.device)
