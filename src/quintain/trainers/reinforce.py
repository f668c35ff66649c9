"""REINFORCE: the plain score function with a batch baseline; with normalised advantages, REINFORCE++."""

from __future__ import annotations

from quintain.advantages.group import batch_baseline, batch_whitened
from quintain.configs.algorithms import ReinforceConfig
from quintain.objectives.clip import probability_ratio
from quintain.objectives.score_function import score_function_loss
from quintain.trainers.base import OnlineRLTrainer
from quintain.types import LossOutput, PolicyOutputs, Rollouts


class ReinforceTrainer(OnlineRLTrainer):
    """REINFORCE (Williams 1992) and REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)."""

    config_class = ReinforceConfig
    config: ReinforceConfig

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """Reward less the batch mean, at unit variance when `normalize_advantages` is on."""
        advantages = rollouts.rewards
        if self.config.baseline == "batch":
            advantages = batch_baseline(advantages, rollouts.scored)
        if self.config.normalize_advantages:
            advantages = batch_whitened(advantages, rollouts.scored)
        return rollouts.replace(advantages=advantages[:, None].expand(rollouts.completion_ids.shape))

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """Score function of each token, weighed by its probability ratio where the rollout is being reused."""
        weight = probability_ratio(outputs.logprobs - rollouts.old_logprobs).detach()
        per_token = score_function_loss(outputs.logprobs, weight * rollouts.advantages)
        return LossOutput({"policy": self.aggregate(per_token, rollouts)})
