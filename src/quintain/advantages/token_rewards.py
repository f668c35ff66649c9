"""Where rewards sit: one number a completion on its last token, intermediate rewards on the tokens that earned them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quintain.errors import RewardError


def per_token_rewards(
    returned: Any, completion_mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, "batch completion"]:
    """What a `compute_rewards` returned, as `[batch, completion]`, 0 outside the mask.

    It may be rewards alone, or a pair (or more) of rewards and their non-score part, which is not read. Rewards are a
    tensor `[batch, completion]`; or a tensor `[batch]`, each number for its row's last valid token; or a list with a
    `[completion]` tensor a row, as TRL 0.4 had it.

    Raises:
        RewardError: it has another shape, it can be read in two ways, or a reward of a valid token is not finite.
    """
    whole = _as_matrix(returned, completion_mask)
    first = _as_matrix(returned[0], completion_mask) if isinstance(returned, list | tuple) and returned else None
    rewards = whole if first is None else first
    if rewards is None or (whole is not None and first is not None):
        fault = "can be read in two ways" if rewards is not None else "fits neither"
        raise RewardError(
            f"compute_rewards must return rewards {list(completion_mask.shape)} (batch, completion) or "
            f"[{len(completion_mask)}], or a pair of them and their non-score part: got {_described(returned)}, which "
            f"{fault}. No weight was changed."
        )
    bad = completion_mask & ~rewards.isfinite()
    if bool(bad.any()):
        row, token = divmod(int(bad.flatten().nonzero()[0]), bad.shape[1])
        raise RewardError(
            f"compute_rewards returned {float(rewards[row, token])} for row {row}, completion token {token}: rewards "
            f"of valid tokens must be finite. No weight was changed."
        )
    return torch.where(completion_mask, rewards, 0.0)


def _as_matrix(given: Any, mask: Bool[Tensor, "batch completion"]) -> Float[Tensor, "batch completion"] | None:
    """Rewards in one of their three forms as `[batch, completion]`, or None for anything else."""
    if isinstance(given, list | tuple) and len(given) == len(mask):
        if all(isinstance(row, Tensor) and row.shape == mask.shape[1:] for row in given):
            return torch.stack(list(given)).detach()
        return None
    if isinstance(given, Tensor) and given.shape == mask.shape:
        return given.detach()
    if isinstance(given, Tensor) and given.shape == mask.shape[:1]:
        return at_last_token(given.detach(), mask)
    return None


def _described(returned: Any) -> str:
    if isinstance(returned, list | tuple):
        kinds = ", ".join(_described(item) for item in returned[:3]) or "nothing"
        return f"a {type(returned).__name__} of {len(returned)}: {kinds}"
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
