"""Generalised advantage estimation."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quintain.errors import ConfigError
from quintain.masking import zero_masked


@torch.no_grad()
def gae(
    rewards: Float[Tensor, "batch completion"],
    values: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "batch completion"], Float[Tensor, "batch completion"]]:
    """Advantages and returns of the valid tokens; 0 elsewhere.

        delta_t     = reward_t + gamma * value_{t+1} - value_t
        advantage_t = delta_t + gamma * lam * advantage_{t+1}
        return_t    = advantage_t + value_t

    `t+1` is the next valid token of the row. After the last one value and advantage are 0: the episode has ended.

    Args:
        rewards: of each token; an end-of-text score sits on the last valid token.
        values: the critic's estimate before each token, that is of the rewards from it on.
        mask: True on valid tokens. What stands elsewhere is never read.
        gamma: discount a token, in [0, 1].
        lam: weight of longer returns, in [0, 1]; 1 is the plain return less the value, 0 the one-step error.
    Raises:
        ConfigError: gamma or lam is outside [0, 1].
    Source: Schulman et al. 2016, arXiv:1506.02438, eqs. 11-16.
    """
    for name, coefficient in (("gamma", gamma), ("lam", lam)):
        if not 0 <= coefficient <= 1:
            raise ConfigError(f"{name} must be in [0, 1]: got {coefficient}. Usual: gamma 0.99 to 1, lam 0.9 to 1.")
    rewards, values = zero_masked(rewards, mask), zero_masked(values, mask)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        valid = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(valid, advantage, 0.0)
        next_value = torch.where(valid, values[:, t], next_value)
        next_advantage = torch.where(valid, advantage, next_advantage)
    return advantages, advantages + values
