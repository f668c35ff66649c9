"""Where rewards sit: one number a completion on its last token, intermediate rewards on the tokens that earned them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quintain.errors import RewardError


def per_token_rewards(returned: Any, mask: Bool[Tensor, "batch completion"]) -> Float[Tensor, "batch completion"]:
    """What a `compute_rewards` returned, as `[batch, completion]`.

    It may be rewards alone, or rewards and their non-score part, which is not read; each as a tensor or as a list of
    one tensor a row, as TRL 0.4 had it. One number a completion belongs to its last valid token.

    Raises:
        RewardError: it has another shape.
    """
    rewards = returned[0] if isinstance(returned, tuple) else returned
    if isinstance(rewards, list) and all(isinstance(row, Tensor) for row in rewards) and rewards:
        rewards = torch.stack(rewards) if len({row.shape for row in rewards}) == 1 else None
    if isinstance(rewards, Tensor) and rewards.shape == mask.shape:
        return torch.where(mask, rewards.detach(), 0.0)
    if isinstance(rewards, Tensor) and rewards.shape == mask.shape[:1]:
        return at_last_token(rewards.detach(), mask)
    raise RewardError(
        f"compute_rewards must return rewards {list(mask.shape)} (batch, completion) or [{len(mask)}], or a pair of "
        f"them and their non-score part: got {_described(returned)}. No weight was changed."
    )


def _described(returned: Any) -> str:
    if isinstance(returned, list | tuple):
        return f"{type(returned).__name__} of {', '.join(_described(item) for item in returned[:3]) or 'nothing'}"
    return f"a tensor {list(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__


def spread_intermediate(
    rewards: Float[Tensor, "batch completion"],
    token_rewards: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
) -> Float[Tensor, "batch completion"]:
    """Move intermediate rewards from the last token, where their sum stood, to the tokens that earned them."""
    dense = torch.where(mask, token_rewards, 0.0)
    return rewards + dense - at_last_token(dense.sum(dim=1), mask)


def at_last_token(
    scores: Float[Tensor, " batch"], mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, "batch completion"]:
    """`[batch, completion]` holding each score at its row's last valid token, and 0 elsewhere."""
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).max(dim=1).values
    return torch.where((position == last[:, None]) & mask, scores[:, None], 0.0)
