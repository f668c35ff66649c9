"""What the paper compares with and no trainer of ours is: ablations, and baselines in the form that it gave them.

Each is the library's loop with its blanks filled in, from the same functions that the named trainers use.
"""

from __future__ import annotations

from torch import Tensor

from quintain.advantages.group import batch_baseline, group_relative
from quintain.configs.algorithms import GRPOConfig, ReinforceConfig, TPOConfig
from quintain.kl.estimators import ESTIMATORS
from quintain.masking import masked_row_sum
from quintain.objectives.clip import clipped_surrogate, clipped_surrogate_from_ratio, summed_sequence_ratio
from quintain.objectives.score_function import score_function_loss
from quintain.segments import Segments
from quintain.trainers.base import OnlineRLTrainer
from quintain.trainers.tpo import TPOTrainer
from quintain.types import LossOutput, LossTerm, PolicyOutputs, Rollouts

CLIP_RANGE = 0.2


class CriticFreePPO(OnlineRLTrainer):
    """PPO's clipped surrogate a token, with the reward less the batch mean as advantage and no value model."""

    config_class = ReinforceConfig

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        advantages = batch_baseline(rollouts.rewards, rollouts.scored)
        return rollouts.replace(advantages=advantages[:, None].expand(rollouts.completion_ids.shape))

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        per_token = clipped_surrogate(
            outputs.logprobs, rollouts.old_logprobs, rollouts.advantages, clip_range=CLIP_RANGE
        )
        return LossOutput({"policy": self.aggregate(per_token, rollouts)})


class SequenceGRPO(OnlineRLTrainer):
    """GRPO as the paper's code computes it: one ratio a completion, of its whole probability, clipped once.

    The KL penalty is k3 of the same summed log-ratio, to the policy that sampled.
    """

    config_class = GRPOConfig
    config: GRPOConfig

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        advantages = group_relative(rollouts.rewards, rollouts.group_ids, rollouts.scored, correction=0)
        return rollouts.replace(signals={"advantages": advantages})

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        mask, config = rollouts.loss_mask, self.config
        ratio = summed_sequence_ratio(outputs.logprobs, rollouts.old_logprobs, mask)
        losses = clipped_surrogate_from_ratio(ratio, rollouts.signals["advantages"], clip_range=config.epsilon)
        log_ratio = masked_row_sum(outputs.logprobs - rollouts.old_logprobs, mask)
        kl = ESTIMATORS[config.kl_estimator](log_ratio)
        return LossOutput({"policy": LossTerm((losses + config.beta * kl).sum(), "sequence")})

    @property
    def kl_loss_coef(self) -> float:
        return 0.0  # part of `loss`


class GroupPG(OnlineRLTrainer):
    """TPO's candidates and standardised scores, as weights of a plain policy gradient instead of a target."""

    config_class = TPOConfig

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        scores = group_relative(rollouts.rewards, rollouts.group_ids, rollouts.scored, correction=0)
        return rollouts.replace(advantages=scores[:, None].expand(rollouts.completion_ids.shape))

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        per_token = score_function_loss(outputs.logprobs, rollouts.advantages)
        return LossOutput({"policy": self.aggregate(per_token, rollouts)})


class TPOWithoutAnchor(TPOTrainer):
    """A target that forgets what the sampling policy thought: q = softmax(u / eta)."""

    def anchor_logits(self, rollouts: Rollouts) -> Tensor:
        return rollouts.rewards.new_zeros(len(rollouts))


class TPOWithoutTies(TPOTrainer):
    """Groups whose rewards are all equal are left out of the loss, in every epoch."""

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        rollouts = super().estimate(rollouts)
        segments = Segments.of(rollouts.group_ids, rollouts.loss_rows)
        return rollouts.replace(excluded=segments.tied(rollouts.rewards)[segments.index])
