"""Losses of the PPO family: the clipped surrogate, its ratios, CISPO, and the clipped value loss.

What is not said to be per sequence is per token and comes before masking and reduction.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quintain.errors import ConfigError
from quintain.masking import masked_row_mean, masked_row_sum

LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8, beyond every clip. Past 88 nats exp overflows float32, and 0 * inf is a NaN in the gradient."""


def probability_ratio(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """exp(log_ratio), with the log-ratio bounded to +-LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_ratio(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
) -> Float[Tensor, "batch completion"]:
    """Length-normalised probability ratio of each sequence, repeated for each of its tokens.

        ratio = exp(mean_t(logprobs_t - old_logprobs_t))

    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071.
    """
    ratio = probability_ratio(masked_row_mean(logprobs - old_logprobs, mask))
    return ratio[:, None].expand_as(logprobs)


def summed_sequence_ratio(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
) -> Float[Tensor, " batch"]:
    """Probability ratio of each whole sequence.

        ratio = exp(sum_t(logprobs_t - old_logprobs_t))

    Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740: the whole completion is one action.
    """
    return probability_ratio(masked_row_sum(logprobs - old_logprobs, mask))


def clipped_surrogate(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Float[Tensor, "*tokens"]:
    """Per-token clipped surrogate loss, before masking and reduction.

        ratio = exp(logprobs - old_logprobs)
        loss  = clipped_surrogate_from_ratio(ratio, advantages)

    Args:
        logprobs: under the online policy, in nats; the only input that carries gradient.
        old_logprobs: under the policy that sampled, recomputed by the training forward pass.
        advantages, clip_range, clip_range_high, dual_clip: as in `clipped_surrogate_from_ratio`.
    Raises:
        ConfigError: as `clipped_surrogate_from_ratio`.
    """
    return clipped_surrogate_from_ratio(
        probability_ratio(logprobs - old_logprobs),
        advantages,
        clip_range=clip_range,
        clip_range_high=clip_range_high,
        dual_clip=dual_clip,
    )


def clipped_surrogate_from_ratio(
    ratio: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Float[Tensor, "*tokens"]:
    """Clipped surrogate loss of each ratio (of a token or of a sequence), before masking and reduction.

        gain = min(ratio * advantage, clamp(ratio, 1 - clip_range, 1 + clip_range_high) * advantage)
        gain = max(gain, dual_clip * advantage)      where advantage < 0 and dual_clip is given
        loss = -gain

    Args:
        ratio: probability under the online policy over that under the policy that sampled; carries the gradient.
        advantages: larger is better.
        clip_range: how far the ratio may fall below 1 before a negative advantage stops pushing, in (0, 1).
        clip_range_high: how far it may rise above 1 before a positive advantage stops pushing, above 0; None:
            clip_range.
        dual_clip: ratio beyond which a negative advantage stops pushing, above 1 + clip_range_high; None: no bound.
            Capping the unclipped ratio at this number (two-sided clipping, `delta` in TRL's GRPO; INTELLECT-2,
            arXiv:2505.07291) is the same formula: with a positive advantage the ordinary clip is reached first.
    Raises:
        ConfigError: a coefficient is outside its range.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric range: Yu et al. 2025 (DAPO), arXiv:2503.14476;
        dual clip: Ye et al. 2020, arXiv:1912.09729.
    """
    low, high = _clip_bounds(clip_range, clip_range_high, dual_clip)
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain


def clipped_tokens(
    ratio: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Bool[Tensor, "*tokens"]:
    """Where a bound of `clipped_surrogate_from_ratio` is active, so that the token has no gradient.

    Its masked mean is the clip fraction. A ratio outside the range whose advantage pulls it back is not clipped.
    """
    low, high = _clip_bounds(clip_range, clip_range_high, dual_clip)
    outside = (advantages > 0) & (ratio > high) | (advantages < 0) & (ratio < low)
    if dual_clip is not None:
        outside = outside | (advantages < 0) & (ratio > dual_clip)
    return outside


def cispo(
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    clip_high: float,
) -> Float[Tensor, "*tokens"]:
    """Per-token policy gradient, weighted by a clipped importance ratio that is not differentiated.

        weight = min(exp(logprobs - old_logprobs), clip_high), without gradient
        loss   = -weight * advantages * logprobs

    Unlike the clipped surrogate it keeps a gradient on every token. Only the gradient means anything, not the value.

    Args:
        logprobs: under the online policy, in nats; the only input that carries gradient.
        old_logprobs: under the policy that sampled, recomputed by the training forward pass.
        advantages: larger is better.
        clip_high: largest weight, above 0. It bounds the ratio itself, not its distance from 1.
    Raises:
        ConfigError: clip_high is not above 0.
    Source: MiniMax 2025, arXiv:2506.13585, eqs. 4-5, without the lower clip, as in its experiments.
    """
    if not clip_high > 0:
        raise ConfigError(f"clip_high bounds the ratio itself and must be above 0: got {clip_high}. Usual: 5.")
    weight = probability_ratio(logprobs - old_logprobs).clamp(max=clip_high).detach()
    return -weight * advantages * logprobs


def clipped_value_loss(
    values: Float[Tensor, "*tokens"],
    old_values: Float[Tensor, "*tokens"],
    returns: Float[Tensor, "*tokens"],
    *,
    clip_range: float,
) -> Float[Tensor, "*tokens"]:
    """Half the squared error of the values, counted as no better than a move of `clip_range` would have made it.

        clipped = clamp(values, old_values - clip_range, old_values + clip_range)
        loss    = max((values - returns)^2, (clipped - returns)^2) / 2

    Args:
        values: of the online critic; the only input that carries gradient.
        old_values: of the critic when the rollout was made.
        returns: what the values should have been.
        clip_range: largest useful move, in units of reward, above 0.
    Raises:
        ConfigError: clip_range is not above 0.
    Source: the code behind arXiv:1707.06347 (openai/baselines, ppo2/model.py); the paper does not mention it.
    """
    if not clip_range > 0:
        raise ConfigError(f"clip_range of the value loss must be above 0: got {clip_range}. Usual: 0.2.")
    clipped = values.clamp(old_values - clip_range, old_values + clip_range)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2


def _clip_bounds(clip_range: float, clip_range_high: float | None, dual_clip: float | None) -> tuple[float, float]:
    """The interval of ratios, after checking it."""
    if not 0 < clip_range < 1:
        raise ConfigError(f"clip_range must be in (0, 1): got {clip_range}. Usual: 0.2.")
    rise = clip_range if clip_range_high is None else clip_range_high
    if not rise > 0:
        raise ConfigError(f"clip_range_high must be above 0: got {rise}. Usual: 0.28, or None for clip_range.")
    if dual_clip is not None and not dual_clip > 1 + rise:
        raise ConfigError(
            f"dual_clip bounds the ratio itself and must exceed 1 + clip_range_high = {1 + rise:g}, or it would cut "
            f"the range that is meant to be free: got {dual_clip}. Usual: 3."
        )
    return 1 - clip_range, 1 + rise
