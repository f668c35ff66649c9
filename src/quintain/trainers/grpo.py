"""GRPO: advantages relative to the prompt's group, clipped updates. Also DAPO, Dr. GRPO, GSPO and CISPO."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quintain.advantages.group import group_centred_batch_scaled, group_mean_centred, group_relative
from quintain.configs.algorithms import GRPOConfig
from quintain.masking import masked_row_sum, masked_sum
from quintain.objectives.clip import (
    cispo,
    clipped_surrogate_from_ratio,
    clipped_tokens,
    probability_ratio,
    sequence_ratio,
)
from quintain.trainers.base import OnlineRLTrainer
from quintain.types import LossOutput, LossTerm, PolicyOutputs, Rollouts


class GRPOTrainer(OnlineRLTrainer):
    """Group Relative Policy Optimization (Shao et al. 2024, arXiv:2402.03300) and the variants of `loss_type`."""

    config_class = GRPOConfig
    config: GRPOConfig

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """A completion's advantage is how much better it is than the others of its prompt, the same at each token."""
        rewards, groups, scored = rollouts.rewards, rollouts.group_ids, rollouts.scored
        correction = 1 if self.config.group_std == "sample" else 0
        if self.config.scale_rewards == "group":
            advantages = group_relative(rewards, groups, scored, correction=correction)
        elif self.config.scale_rewards == "batch":
            advantages = group_centred_batch_scaled(rewards, groups, scored, correction=correction)
        else:
            advantages = group_mean_centred(rewards, groups, scored)
        return rollouts.replace(advantages=advantages[:, None].expand(rollouts.completion_ids.shape))

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """Clipped surrogate of each token, aggregated as `loss_type` says."""
        config, mask, advantages = self.config, rollouts.loss_mask, rollouts.advantages
        logprobs, old_logprobs = outputs.logprobs, rollouts.old_logprobs
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        if config.importance_sampling_level == "sequence":
            ratio = sequence_ratio(logprobs, old_logprobs, mask)
        else:
            ratio = probability_ratio(logprobs - old_logprobs)
        if config.loss_type == "cispo":
            per_token = cispo(logprobs, old_logprobs, advantages, clip_high=1 + high)
            clipped = ratio > 1 + high
        else:
            bounds: dict[str, Any] = {"clip_range": config.epsilon, "clip_range_high": high, "dual_clip": config.delta}
            per_token = clipped_surrogate_from_ratio(ratio, advantages, **bounds)
            clipped = clipped_tokens(ratio, advantages, **bounds)
        return LossOutput(
            {"policy": self.aggregate(per_token, rollouts)},
            means={"clip_fraction": (masked_sum(clipped.to(ratio.dtype), mask), mask.sum())},
        )

    def aggregate(self, per_token: Tensor, rollouts: Rollouts) -> LossTerm:
        """Token mean; or for "grpo" and "dr_grpo" a mean over completions of their token mean or scaled token sum."""
        rows = masked_row_sum(per_token, rollouts.loss_mask)
        if self.config.loss_type == "grpo":
            return LossTerm((rows / rollouts.lengths.clamp(min=1)).sum(), "sequence")
        if self.config.loss_type == "dr_grpo":
            return LossTerm(rows.sum() / self.config.max_completion_length, "sequence")
        return LossTerm(rows.sum(), "token")
