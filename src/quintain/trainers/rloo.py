"""RLOO: the whole completion is one action, its baseline the mean reward of the group's others, KL in the reward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quintain.advantages.group import leave_one_out
from quintain.configs.algorithms import RLOOConfig
from quintain.masking import masked_row_sum, masked_sum, masked_whiten, whitening_scale
from quintain.objectives.clip import clipped_surrogate_from_ratio, clipped_tokens, summed_sequence_ratio
from quintain.trainers.base import OnlineRLTrainer
from quintain.types import LossOutput, LossTerm, PolicyOutputs, Rollouts


class RLOOTrainer(OnlineRLTrainer):
    """REINFORCE Leave-One-Out (Ahmadian et al. 2024, arXiv:2402.14740), clipped at the sequence level."""

    config_class = RLOOConfig
    config: RLOOConfig
    unit = "sequence"

    @property
    def kl_loss_coef(self) -> float:
        return self.kl_direct_coef

    def aggregate_kl(self, per_token: Tensor, rollouts: Rollouts) -> LossTerm:
        """As KL in the reward: summed over a completion, whose mean over completions is the loss."""
        return LossTerm(masked_sum(per_token, rollouts.loss_mask), "sequence")

    @property
    def kl_reward_coef(self) -> float:
        return self.kl_coef

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """Reward less KL over the completion, less the same of the group's other completions on average."""
        rewards = rollouts.rewards
        if self.kl_reward_coef > 0:
            kl = masked_row_sum(self.kl_in_rewards(rollouts), rollouts.completion_mask)
            rewards = rewards - self.kl_reward_coef * kl
        advantages = leave_one_out(rewards, rollouts.group_ids, rollouts.scored)
        if self.config.normalize_advantages:
            self.advantage_scale = whitening_scale(advantages, rollouts.scored)
            advantages = masked_whiten(advantages, rollouts.scored)
        return rollouts.replace(advantages=advantages[:, None].expand(rollouts.completion_ids.shape))

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """Clipped surrogate of each completion's own probability ratio, averaged over completions."""
        rows, advantages = rollouts.loss_rows, rollouts.advantages[:, 0]
        ratio = summed_sequence_ratio(outputs.logprobs, rollouts.old_logprobs, rollouts.loss_mask)
        bounds: dict[str, Any] = {"clip_range": self.config.epsilon, "clip_range_high": self.config.epsilon_high}
        per_sequence = clipped_surrogate_from_ratio(ratio, advantages, **bounds)
        clipped = clipped_tokens(ratio, advantages, **bounds).to(ratio.dtype)
        return LossOutput(
            {"policy": LossTerm(masked_sum(per_sequence, rows), "sequence")},
            means={"clip_fraction": (masked_sum(clipped, rows), rows.sum())},
        )
