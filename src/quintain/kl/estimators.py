"""Estimates of the KL divergence from a policy to a reference, a token at a time.

`log_ratio` is the policy's log-probability of a sampled token less the reference's, in nats. The tokens were sampled
from the policy, and all expectations below are over such samples. An estimate may serve as a number to log or to
subtract from a reward (its value matters) or as a term of the loss (its gradient matters); these are two questions:

| | value | gradient, as a term of the loss |
|---|---|---|
| `k1` | unbiased, varies most, often negative | 0 on average: no restraint, only noise |
| `k2` | biased, never negative | unbiased for the gradient of KL(policy || reference) |
| `k3` | unbiased, never negative | unbiased for the gradient of KL(reference || policy) |
| `exact_kl` | exact, never negative | exact for KL(policy || reference) |

Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, for the values; Tang and
Munos 2025, arXiv:2506.09477, for the gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

LOWEST_LOG_RATIO = -20.0
"""`k3` grows as exp(-log_ratio), which overflows float32 at 88 nats and turns gradients into NaN; here it is 5e8."""


def k1(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """The log-ratio itself.

        k1 = log_ratio

    Value: unbiased for KL(policy || reference); negative wherever the reference likes the token better.
    Gradient: that of the policy's log-probability, whose expectation is 0. In a loss it adds noise instead of
    restraint; in a reward, where it is not differentiated, it is the right choice.
    """
    return log_ratio


def k2(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """Half the squared log-ratio.

        k2 = log_ratio^2 / 2

    Value: never negative; biased, by an amount of third order in the distance of the policies.
    Gradient: unbiased for the gradient of KL(policy || reference).
    """
    return log_ratio.square() / 2


def k3(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """The log-ratio with a control variate that makes every term non-negative.

        k3 = exp(-log_ratio) - 1 + log_ratio

    Value: never negative; unbiased for KL(policy || reference), with less variance than `k1` while the policies are
    close.
    Gradient: unbiased for the gradient of the other direction, KL(reference || policy), which is nearly the same for
    close policies. Below LOWEST_LOG_RATIO the value is cut off and the gradient 0, so that both stay finite.
    """
    log_ratio = log_ratio.clamp(min=LOWEST_LOG_RATIO)
    # expm1: near 0 the exponential is 1 plus something below float32's resolution, and that something is the answer.
    return (-log_ratio).expm1() + log_ratio


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name that the setting `kl_estimator` uses. "exact" is not here: it needs logits, not the sampled tokens."""


def exact_kl(
    logits: Float[Tensor, "*tokens vocab"], reference_logits: Float[Tensor, "*tokens vocab"]
) -> Float[Tensor, "*tokens"]:
    """KL(policy || reference) over the whole vocabulary, in nats.

        kl = sum_v p_v * (log p_v - log reference_v)

    Both carry gradient if their inputs do; pass logits divided by the sampling temperature.
    """
    logprobs = logits.log_softmax(dim=-1)
    return (logprobs.exp() * (logprobs - reference_logits.log_softmax(dim=-1))).sum(dim=-1)
