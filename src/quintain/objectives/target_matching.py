"""Target Policy Optimization: fit the policy's weights over a prompt's group to a target tilted by the scores.

A group is the candidates (completions) of one prompt. Each candidate has a logit `l_i`, for example its summed
log-probability, and the policy's weights over the group are `p = softmax(l)`. Rows of a group may stand anywhere in the
batch; per-group results are in ascending order of group id. A row that is not `scored` is no candidate: it has weight
0, and may hold NaN.

Source: Kaddour 2026, arXiv:2604.06159.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quintain.errors import ConfigError
from quintain.masking import zero_masked
from quintain.segments import Segments

BISECTIONS = 32
"""Halvings of [0, 1] in `tempered_scale`: fine enough for logits that lie 10^5 nats apart."""

ROUNDING = 1e-6
"""Relative slack on the effective size, so that a group that meets the bound exactly is left alone."""


def standardised_scores(
    rewards: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Rewards with mean 0 and population standard deviation 1 over each group.

        u_i = (reward_i - mean(group)) / std(group)

    Exactly 0 throughout a group whose rewards are equal up to rounding, and for rows without score.

    Source: arXiv:2604.06159, eq. 1.
    """
    return Segments.of(group_ids, scored).standardised(rewards, correction=0)


def group_softmax(
    group_logits: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Weights proportional to exp(logit), summing to 1 over the scored rows of each group; 0 for other rows."""
    return _weights(group_logits, Segments.of(group_ids, scored))


@torch.no_grad()
def target_distribution(
    scores: Float[Tensor, " batch"],
    old_group_logits: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    scored: Bool[Tensor, " batch"],
    *,
    target_temperature: float,
) -> Float[Tensor, " batch"]:
    """The weights to fit: the old policy's, tilted towards the higher scores. Carries no gradient.

        q = softmax(old_group_logits + scores / target_temperature)

    Args:
        scores: standardised over the group.
        old_group_logits: of the policy that the target is tilted from, usually the one that sampled.
        group_ids: equal for completions of one prompt.
        scored: True on candidates.
        target_temperature: above 0; the larger, the closer the target stays to the old weights.
    Raises:
        ConfigError: target_temperature is not above 0.
    Source: arXiv:2604.06159, eq. 2.
    """
    if not target_temperature > 0:
        raise ConfigError(f"target_temperature (eta) must be above 0: got {target_temperature}. Usual: 1.")
    return group_softmax(old_group_logits + scores / target_temperature, group_ids, scored)


def target_matching_loss(
    group_logits: Float[Tensor, " batch"],
    target_weights: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    scored: Bool[Tensor, " batch"],
) -> Float[Tensor, " groups"]:
    """Cross-entropy of each group's weights against its target; 0 for a group without scored rows.

        p    = softmax(group_logits)
        loss = -sum_i q_i * log p_i,    with gradient p - q on group_logits

    The caller sums the groups and divides by the number of those with a scored row.

    Args:
        group_logits: of the online policy; the only input that carries gradient.
        target_weights: q, from `target_distribution`, summing to 1 over each group's scored rows.
        group_ids: equal for completions of one prompt.
        scored: True on candidates.
    Source: arXiv:2604.06159, eq. 3.
    """
    segments = Segments.of(group_ids, scored)
    group_logits, target_weights = zero_masked(group_logits, scored), zero_masked(target_weights, scored).detach()
    with torch.no_grad():
        shifted = _shifted(group_logits, segments)
        log_total = segments.sum(shifted.exp()).log()
        cross_entropy = segments.sum(target_weights * (log_total[segments.index] - shifted))
        gradient = _weights(group_logits, segments) - target_weights
    # Differentiating the cross-entropy gives sum(q) * p - q, and sum(q) is 1 only up to rounding: groups without signal
    # would drift, with Adam by full steps. So p - q itself is attached, to a term whose value is 0.
    return cross_entropy + segments.sum(gradient * (group_logits - group_logits.detach()))


@torch.no_grad()
def tempered_scale(
    group_logits: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    scored: Bool[Tensor, " batch"],
    *,
    min_effective_group: float,
    group_size: int,
) -> Float[Tensor, " batch"]:
    """The largest factor <= 1 on each group's logits that keeps the group's effective size. Carries no gradient.

        max scale <= 1  such that  1 / sum_i softmax(scale * group_logits)_i^2 >= min_effective_group

    Summed log-probabilities of long completions lie so far apart that one candidate has all the weight and nothing is
    left to move. The effective size falls as the scale rises, so bisection finds the factor; it is 1 for a group that
    is broad enough as it is. A group with n < group_size scored rows must keep the same share of them,
    n / group_size * min_effective_group.

    Args:
        group_logits: summed log-probabilities, in nats.
        group_ids: equal for completions of one prompt.
        scored: True on candidates.
        min_effective_group: candidates, in [1, group_size).
        group_size: completions a prompt.
    Returns:
        The group's factor on each of its rows, in (0, 1].
    Raises:
        ConfigError: min_effective_group is outside [1, group_size).
    """
    if not 1 <= min_effective_group < group_size:
        raise ConfigError(
            f"min_effective_group must be at least 1 and below the group size ({group_size}), which only equal weights "
            f"reach: got {min_effective_group}. Usual: {group_size / 2:g}."
        )
    segments = Segments.of(group_ids, scored)
    required = segments.count() * (min_effective_group / group_size)

    def is_broad(scale: Tensor) -> Tensor:
        squares = _weights(scale[segments.index] * group_logits, segments).square()
        return segments.sum(squares) * required <= 1 + ROUNDING

    one = group_logits.new_ones(segments.number)
    low, high = torch.zeros_like(one), one
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        broad = is_broad(middle)
        low, high = torch.where(broad, middle, low), torch.where(broad, high, middle)
    return torch.where(is_broad(one), one, low)[segments.index]


def effective_group_size(
    weights: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Float[Tensor, " groups"]:
    """How many candidates share a group's weight, from 1 (one has it all) to their number; 0 without scored rows.

    size = 1 / sum_i weight_i^2
    """
    squares = Segments.of(group_ids, scored).sum(weights.square())
    return torch.where(squares > 0, 1 / squares, 0.0)


def target_entropy(
    target_weights: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"], scored: Bool[Tensor, " batch"]
) -> Float[Tensor, " groups"]:
    """Entropy of each group's target in nats, from 0 to log(number of candidates); 0 without scored rows.

    entropy = -sum_i q_i * log q_i
    """
    return Segments.of(group_ids, scored).sum(torch.special.entr(target_weights))


def _weights(group_logits: Float[Tensor, " batch"], segments: Segments) -> Float[Tensor, " batch"]:
    """`group_softmax`, for groups already found."""
    unnormalised = _shifted(group_logits, segments).exp()
    # The largest term of a group is exp(0), so only the sum of a group without rows is below 1.
    return unnormalised / segments.sum(unnormalised).clamp(min=1.0)[segments.index]


def _shifted(group_logits: Float[Tensor, " batch"], segments: Segments) -> Float[Tensor, " batch"]:
    """Logits less the largest of their group, so that exponentials cannot overflow; minus infinity if not counted."""
    largest = segments.max(group_logits.detach())
    return torch.where(segments.counted, group_logits - largest[segments.index], -torch.inf)
