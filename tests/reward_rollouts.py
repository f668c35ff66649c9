"""Rollouts made by hand, for tests of the reward stage."""

from __future__ import annotations

from typing import Any

import torch

from quintain.types import Rollouts


def make_rollouts(
    completions: list[Any],
    *,
    prompts: list[Any] | None = None,
    lengths: list[int] | None = None,
    columns: dict[str, list[Any]] | None = None,
) -> Rollouts:
    """One group of the given completions. Row i has `lengths[i]` valid tokens (3 if not given): 10, 11, 12, ..."""
    number = len(completions)
    lengths = lengths or [3] * number
    positions = torch.arange(max(lengths)).expand(number, -1)
    return Rollouts(
        prompt_ids=torch.ones(number, 2, dtype=torch.long),
        prompt_mask=torch.ones(number, 2, dtype=torch.bool),
        completion_ids=positions + 10,
        completion_mask=positions < torch.tensor(lengths)[:, None],
        stopped=torch.ones(number, dtype=torch.bool),
        sampling_logprobs=torch.zeros(number, max(lengths)),
        group_ids=torch.zeros(number, dtype=torch.long),
        prompts=prompts or ["a prompt"] * number,
        completions=completions,
        columns=columns or {},
    )
