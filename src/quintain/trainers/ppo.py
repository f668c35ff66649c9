"""PPO: a learned value baseline, per-token rewards with KL inside, clipped updates of policy and critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintain.advantages.gae import gae
from quintain.configs.algorithms import PPOConfig
from quintain.kl.estimators import ESTIMATORS
from quintain.masking import masked_whiten, sum_from_mean
from quintain.monitor.statistics import explained_variance
from quintain.objectives.clip import (
    clipped_surrogate_from_ratio,
    clipped_tokens,
    clipped_value_loss,
    probability_ratio,
)
from quintain.trainers.base import OnlineRLTrainer
from quintain.types import LossOutput, LossTerm, PolicyOutputs, Rollouts


class PPOTrainer(OnlineRLTrainer):
    """Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347) for language models.

    Each stage is a method to override: `generate_rollouts`, `compute_rewards`, `compute_advantages`, `actor_loss`,
    `critic_loss`.

    Args beyond the base class:
        reward_model: a reward model beside or instead of `reward_funcs`.
        ref_model: the reference policy, if it is not the model that training starts from.
        value_model: a sequence-classification model to start the critic from; overrides `args.value_model`.
    """

    config_class = PPOConfig
    config: PPOConfig

    def __init__(
        self, model: Any, reward_funcs: Any = None, *args: Any, reward_model: Any = None, **kwargs: Any
    ) -> None:
        if reward_model is not None:
            given = [] if reward_funcs is None else reward_funcs
            reward_funcs = [*(given if isinstance(given, list | tuple) else [given]), reward_model]
        super().__init__(model, reward_funcs, *args, **kwargs)

    @property
    def kl_loss_coef(self) -> float:
        return self.config.kl_in_loss

    @property
    def kl_reward_coef(self) -> float:
        return self.kl_coef

    @property
    def slots(self) -> set[str]:
        overridden = type(self).compute_rewards is not PPOTrainer.compute_rewards
        return super().slots | ({self.config.reference_slot} if overridden else set())

    @property
    def reads_old_logprobs(self) -> bool:
        return True

    def kl_to_reference(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """In the loss, k1 gives way to k2: its expected gradient there is zero."""
        if self.config.kl_estimator != "k1":
            return super().kl_to_reference(outputs, rollouts)
        return ESTIMATORS["k2"](outputs.logprobs - self.reference_logprobs(rollouts))

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """Scores become per-token rewards, and these become advantages and returns."""
        mask = rollouts.loss_mask
        slot_logprobs = getattr(rollouts, f"{self.config.reference_slot}_logprobs")
        # An override with the usual four parameters must work; only the exact estimator has more to tell.
        exact = {} if rollouts.reference_kl is None else {"kl": rollouts.reference_kl}
        rewards, _ = self.compute_rewards(
            rollouts.rewards,
            rollouts.old_logprobs,
            rollouts.old_logprobs if slot_logprobs is None else slot_logprobs,
            masks=mask,
            **exact,
        )
        if rollouts.token_rewards is not None:
            rewards = self.spread_intermediate(rewards, rollouts)
        if self.config.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = self.compute_advantages(rollouts.values, rewards, mask)
        return rollouts.replace(
            advantages=advantages,
            returns=returns,
            statistics={"explained_variance": explained_variance(rollouts.values, returns, mask)},
        )

    def compute_rewards(
        self,
        scores: Tensor,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        masks: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Per-token rewards: minus `kl_coef` times KL at every valid token, plus the score at the last one.

        Args:
            scores: `[batch]`.
            logprobs, ref_logprobs: `[batch, completion]`, of the sampling and the reference policy, in nats.
            masks: `[batch, completion]`, True on valid tokens; all valid if omitted.
            kl: per-token KL, where it was computed exactly; else estimated from the log-probabilities.
        Returns:
            The rewards and the part of them that is not the score, both `[batch, completion]`, 0 outside the mask.
        """
        masks = torch.ones_like(logprobs, dtype=torch.bool) if masks is None else masks
        if kl is None:
            kl = ESTIMATORS["k1" if self.config.kl_estimator == "exact" else self.config.kl_estimator](
                logprobs - ref_logprobs
            )
        non_score = torch.where(masks, -self.kl_reward_coef * kl, 0.0)
        return non_score + at_last_token(scores, masks), non_score

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """GAE on valid tokens; advantages are whitened afterwards where the config says so, returns are not.

        Args:
            values, rewards, mask: `[batch, completion]`.
        Returns:
            advantages and returns, `[batch, completion]`.
        """
        advantages, returns = gae(rewards, values, mask, gamma=self.config.gamma, lam=self.config.lam)
        if self.config.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        return advantages, returns

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """Actor and critic loss over the valid tokens, which the hooks receive flat."""
        assert outputs.values is not None  # every PPOTrainer has a value model
        mask = rollouts.loss_mask
        ratio = probability_ratio((outputs.logprobs - rollouts.old_logprobs)[mask])
        advantages = rollouts.advantages[mask]
        actor = self.actor_loss(ratio, advantages)
        critic = self.critic_loss(outputs.values[mask], rollouts.returns[mask], rollouts.values[mask])
        clipped = clipped_tokens(ratio.detach(), advantages, **self.clip_bounds)
        return LossOutput(
            {
                "policy": self.token_sum(actor, mask),
                "value": self.weighted(self.config.vf_coef, self.token_sum(critic, mask)),
            },
            means={"clip_fraction": (clipped.to(ratio.dtype).sum(), mask.sum())},
        )

    def actor_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Clipped surrogate of each valid token; an override may return the per-token losses or their mean.

        Args:
            ratio: online over sampling probability of each valid token, `[tokens]`; carries gradient.
            advantages: `[tokens]`.
        """
        return clipped_surrogate_from_ratio(ratio, advantages, **self.clip_bounds)

    def critic_loss(self, values: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        """Half the larger of the clipped and unclipped squared errors, `[tokens]`; an override may return the mean."""
        return clipped_value_loss(values, old_values, returns, clip_range=self.config.cliprange_value)

    @property
    def cliprange(self) -> float:
        """Half-width of the interval around ratio 1, for overrides of `actor_loss`."""
        return self.config.cliprange

    @property
    def clip_bounds(self) -> dict[str, Any]:
        return {"clip_range": self.config.cliprange, "dual_clip": self.config.dual_clip}

    @staticmethod
    def token_sum(losses: Tensor, mask: Tensor) -> LossTerm:
        """A hook's result as a sum over tokens, whether it returned each token's loss or their mean."""
        return LossTerm(sum_from_mean(losses, mask) if losses.ndim == 0 else losses.sum(), "token")

    @staticmethod
    def spread_intermediate(rewards: Tensor, rollouts: Rollouts) -> Tensor:
        """Move intermediate rewards from the last token, where their sum stood, to the tokens that earned them."""
        dense = torch.where(rollouts.loss_mask, rollouts.token_rewards, 0.0)
        return rewards + dense - at_last_token(dense.sum(dim=1), rollouts.loss_mask)


def at_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """`[batch, completion]` holding each score at its row's last valid token, and 0 elsewhere."""
    position = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, position, -1).max(dim=1).values
    return torch.where((position == last[:, None]) & mask, scores[:, None], 0.0)
