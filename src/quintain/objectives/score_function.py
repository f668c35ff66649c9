"""Plain policy gradient, and the delight gate in front of it. Per token, before masking and reduction."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from quintain.errors import ConfigError


def score_function_loss(
    logprobs: Float[Tensor, "*tokens"], advantages: Float[Tensor, "*tokens"]
) -> Float[Tensor, "*tokens"]:
    """Loss whose gradient is the policy gradient; its value means nothing.

        loss = -advantages * logprobs

    Args:
        logprobs: under the online policy, in nats; the only input that carries gradient.
        advantages: larger is better.
    Source: Williams 1992 (REINFORCE), Machine Learning 8, pp. 229-256.
    """
    return -advantages * logprobs


def delight_gate(
    logprobs: Float[Tensor, "*tokens"], advantages: Float[Tensor, "*tokens"], *, delight_temperature: float
) -> Float[Tensor, "*tokens"]:
    """How much of each token's gradient to keep, in [0, 1]; carries no gradient.

        surprisal = -logprobs
        gate      = sigmoid(advantages * surprisal / delight_temperature)

    Surprising tokens that did well are kept, surprising tokens that did badly are dropped, and tokens that the policy
    was sure of are halved either way.

    Args:
        logprobs: under the online policy, in nats.
        advantages: larger is better.
        delight_temperature: above 0; the larger, the closer every gate is to 1/2.
    Raises:
        ConfigError: delight_temperature is not above 0.
    Source: Osband 2026, arXiv:2603.14608.
    """
    if not delight_temperature > 0:
        raise ConfigError(f"delight_temperature (eta) must be above 0: got {delight_temperature}. Usual: 1.")
    return torch.sigmoid(-advantages * logprobs / delight_temperature).detach()


def delight_loss(
    logprobs: Float[Tensor, "*tokens"], advantages: Float[Tensor, "*tokens"], *, delight_temperature: float
) -> Float[Tensor, "*tokens"]:
    """Policy gradient through the delight gate.

        loss = -(gate * advantages) * logprobs

    Args and Raises: as `delight_gate`; `logprobs` is the only input that carries gradient.
    """
    gate = delight_gate(logprobs, advantages, delight_temperature=delight_temperature)
    return score_function_loss(logprobs, gate * advantages)
