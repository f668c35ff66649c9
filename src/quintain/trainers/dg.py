"""DG: the policy gradient, gated by delight (advantage times surprisal)."""

from __future__ import annotations

from quintain.advantages.group import batch_baseline
from quintain.configs.algorithms import DGConfig
from quintain.objectives.score_function import delight_loss
from quintain.trainers.base import OnlineRLTrainer
from quintain.types import LossOutput, PolicyOutputs, Rollouts


class DGTrainer(OnlineRLTrainer):
    """Delightful policy gradient: surprising successes count for more, surprising failures for less."""

    config_class = DGConfig
    config: DGConfig

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """Reward less the batch mean, the same at each token."""
        advantages = batch_baseline(rollouts.rewards, rollouts.scored)
        return rollouts.replace(advantages=advantages[:, None].expand(rollouts.completion_ids.shape))

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """Gated score function of each token, averaged over tokens."""
        per_token = delight_loss(outputs.logprobs, rollouts.advantages, delight_temperature=self.config.eta)
        return LossOutput({"policy": self.aggregate(per_token, rollouts)})
