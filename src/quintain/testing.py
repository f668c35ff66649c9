"""For tests of an algorithm: rollouts and policy outputs from a few numbers, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quintain.types import PolicyOutputs, Rollouts


def make_rollouts(
    rewards: Sequence[float | None],
    *,
    lengths: Sequence[int] | None = None,
    group_ids: Sequence[int] | None = None,
    **fields: Any,
) -> Rollouts:
    """Scored rollouts with the given rewards.

    Args:
        rewards: one a completion; None for one that was not scored.
        lengths: valid tokens of each completion; 1 each if omitted.
        group_ids: equal for completions of one prompt; all one group if omitted.
        fields: further fields of `Rollouts`, such as `old_logprobs`.
    """
    number = len(rewards)
    lengths = [1] * number if lengths is None else lengths
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return Rollouts(
        **{
            "prompt_ids": torch.zeros(number, 1, dtype=torch.long),
            "prompt_mask": torch.ones(number, 1, dtype=torch.bool),
            "completion_ids": torch.zeros(number, width, dtype=torch.long),
            "completion_mask": mask,
            "stopped": torch.ones(number, dtype=torch.bool),
            "sampling_logprobs": torch.full((number, width), torch.nan),
            "group_ids": torch.tensor([0] * number if group_ids is None else group_ids),
            "prompts": [""] * number,
            "completions": [""] * number,
            "rewards": torch.tensor([0.0 if reward is None else float(reward) for reward in rewards]),
            "scored": torch.tensor([reward is not None for reward in rewards]),
            **fields,
        }
    )


def make_outputs(logprobs: Sequence[Sequence[float]]) -> PolicyOutputs:
    """Outputs of a policy with these log-probabilities, `[batch, completion]`, which take gradient."""
    values = torch.tensor(logprobs, requires_grad=True)
    return PolicyOutputs(logprobs=values, entropy=torch.zeros_like(values))
