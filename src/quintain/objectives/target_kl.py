"""Policy gradient regularised towards a moving target policy instead of a frozen reference.

This is the other thing that goes by the name TPO. The KL term is handed in, because how to estimate it is a choice of
its own: with the plain log-ratio (`kl.estimators.k1`), as the form was first written, it has no effect on average.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from quintain.masking import masked_mean, zero_masked
from quintain.objectives.score_function import score_function_loss


def policy_gradient_target_kl(
    logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    target_kl: Float[Tensor, "*tokens"],
    *,
    kl_coef: float,
) -> Float[Tensor, "*tokens"]:
    """Per-token policy gradient with a penalty for leaving the target policy, before masking and reduction.

        loss = -advantages * logprobs + kl_coef * target_kl

    Args:
        logprobs: under the online policy, in nats; carries gradient.
        advantages: larger is better.
        target_kl: KL(online || target) of each token, exact or estimated, in nats; carries gradient.
        kl_coef: not negative.
    """
    return score_function_loss(logprobs, advantages) + kl_coef * target_kl


def ema_kl_loss(
    logprobs: Float[Tensor, "batch completion"],
    target_logprobs: Float[Tensor, "batch completion"],
    advantages: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    *,
    kl_coef: float,
    estimator: Callable[[Tensor], Tensor],
) -> Float[Tensor, ""]:
    """`policy_gradient_target_kl` averaged over the valid tokens of one batch.

        loss = sum_valid(-advantages * logprobs + kl_coef * estimator(logprobs - target_logprobs)) / count_valid

    An empty mask gives 0, through which a gradient of 0 still flows.

    Args:
        logprobs: under the online policy, in nats; the only input that carries gradient.
        target_logprobs: under the EMA target, on the same tokens.
        advantages: larger is better.
        mask: True on the tokens that count; the others may hold anything.
        kl_coef: not negative.
        estimator: from log-ratio to KL, such as those in `kl.estimators`.
    """
    logprobs, target_logprobs, advantages = (zero_masked(x, mask) for x in (logprobs, target_logprobs, advantages))
    target_kl = estimator(logprobs - target_logprobs.detach())
    return masked_mean(policy_gradient_target_kl(logprobs, advantages, target_kl, kl_coef=kl_coef), mask)
