"""Advantages from whole rewards: relative to a prompt's group, to the group's other members, or to the batch.

Every function takes `rewards` with a mask `scored`. A row that was not scored has no say in any statistic, may hold
NaN, and gets advantage 0. Rewards that are equal up to rounding (`masking.is_tied`) give exactly 0, so nothing is ever
divided by a standard deviation made of rounding noise; no epsilon is added to it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quintain.masking import masked_variance
from quintain.segments import Segments


def group_mean_centred(
    rewards: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Reward less the mean of its group.

        advantage = reward - mean(group)

    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
    """
    return Segments.of(group_ids, scored).centred(rewards)


def group_relative(
    rewards: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    scored: Bool[Tensor, " batch"],
    *,
    correction: int = 1,
) -> Float[Tensor, " batch"]:
    """Reward less the mean of its group, in standard deviations of the group.

        advantage = (reward - mean(group)) / std(group)

    Args:
        rewards: any scale.
        group_ids: equal for completions of one prompt.
        scored: True where the reward counts.
        correction: 1 divides squares by n - 1 (sample), 0 by n (population).
    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300. Implementations that add an epsilon to the standard deviation
        shrink groups whose rewards differ little; here the rule for ties takes its place.
    """
    return Segments.of(group_ids, scored).standardised(rewards, correction=correction)


def group_centred_batch_scaled(
    rewards: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    scored: Bool[Tensor, " batch"],
    *,
    correction: int = 1,
) -> Float[Tensor, " batch"]:
    """Reward less the mean of its group, in standard deviations of the whole batch.

        advantage = (reward - mean(group)) / std(batch)

    Args:
        rewards: any scale.
        group_ids: equal for completions of one prompt.
        scored: True where the reward counts.
        correction: 1 divides squares by n - 1 (sample), 0 by n (population).
    Source: Liu et al. 2025 (Lite PPO), arXiv:2508.08221.
    """
    centred = group_mean_centred(rewards, group_ids, scored)
    spread = masked_variance(rewards, scored, correction=correction).sqrt()
    # Where the batch is tied every group is, and `centred` is 0 whatever it is divided by.
    return centred / torch.where(spread > 0, spread, 1.0)


def leave_one_out(
    rewards: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Reward less the mean of the other members of its group; 0 where there is no other.

        advantage = reward - (sum(group) - reward) / (n - 1) = n / (n - 1) * (reward - mean(group))

    Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
    """
    segments = Segments.of(group_ids, scored)
    count = segments.count()
    return segments.centred(rewards) * (count / (count - 1).clamp(min=1))[segments.index]


def batch_baseline(rewards: Float[Tensor, " batch"], scored: Bool[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Reward less the mean of the batch.

        advantage = reward - mean(batch)

    Source: Williams 1992 (REINFORCE), Machine Learning 8, pp. 229-256.
    """
    return group_mean_centred(rewards, _one_group(scored), scored)


def batch_whitened(rewards: Float[Tensor, " batch"], scored: Bool[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Reward less the mean of the batch, in (population) standard deviations of the batch.

        advantage = (reward - mean(batch)) / std(batch)

    Source: Hu et al. 2025 (REINFORCE++), arXiv:2501.03262. There the batch's tokens are whitened, so that long
        completions weigh more in the mean; here each completion counts once.
    """
    return group_relative(rewards, _one_group(scored), scored, correction=0)


def tied_groups(
    rewards: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Bool[Tensor, " groups"]:
    """Whether each group's rewards are equal up to rounding, in ascending order of group id.

    A group with one scored row, or none, is tied.
    """
    return Segments.of(group_ids, scored).tied(rewards)


def tied_fraction(
    rewards: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """The share of tied groups among those with a scored row, in [0, 1]; 0 if nothing was scored."""
    occupied = Segments.of(group_ids, scored).count() > 0
    tied = tied_groups(rewards, group_ids, scored) & occupied
    return tied.sum() / occupied.sum().clamp(min=1)


def _one_group(scored: Bool[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Group ids that put every row into the same group."""
    return torch.zeros_like(scored, dtype=torch.long)
