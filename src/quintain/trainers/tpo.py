"""TPO, Target Policy Optimization: fit the policy over each prompt's group to a target tilted by the scores."""

from __future__ import annotations

from torch import Tensor

from quintain.advantages.group import group_centred_batch_scaled, group_mean_centred, group_relative
from quintain.configs.algorithms import TPOConfig
from quintain.errors import ConfigError
from quintain.kl.estimators import ESTIMATORS
from quintain.masking import masked_row_mean, masked_row_sum, sum_from_mean
from quintain.objectives.clip import probability_ratio
from quintain.objectives.target_kl import ema_kl_loss
from quintain.objectives.target_matching import (
    effective_group_size,
    group_softmax,
    target_distribution,
    target_entropy,
    target_matching_loss,
    tempered_scale,
)
from quintain.trainers.base import OnlineRLTrainer
from quintain.types import LossOutput, LossTerm, PolicyOutputs, Rollouts, Unit


class TPOTrainer(OnlineRLTrainer):
    """Target Policy Optimization (arXiv:2604.06159), with KL to an EMA target policy by default.

    Not Triple Preference Optimization, an offline method under the same letters.
    """

    config_class = TPOConfig
    config: TPOConfig
    unit: Unit = "group"

    def check(self) -> None:
        super().check()
        if self.config.loss_type == "target_matching" and type(self).tpo_loss is not TPOTrainer.tpo_loss:
            raise ConfigError(
                f"{type(self).__name__} overrides tpo_loss, which loss_type='target_matching' does not call. Set "
                f"loss_type='policy_gradient', or override loss."
            )

    @property
    def slots(self) -> set[str]:
        return super().slots | ({self.config.anchor} - {"old"} if self.config.loss_type == "target_matching" else set())

    @property
    def reads_old_logprobs(self) -> bool:
        from_ratio_to_old = self.config.group_logits == "logratio" and self.config.anchor == "old"
        return self.config.loss_type == "target_matching" and not from_ratio_to_old

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """Scores standardised over the group; for target matching, the frozen target that they tilt towards."""
        scores = self.standardise(rollouts)
        if self.config.loss_type == "policy_gradient":
            return rollouts.replace(advantages=scores[:, None].expand(rollouts.completion_ids.shape))
        groups, candidates = rollouts.group_ids, rollouts.loss_rows
        if self.config.group_logits == "tempered":
            scale = tempered_scale(
                masked_row_sum(rollouts.old_logprobs, rollouts.completion_mask),
                groups,
                candidates,
                min_effective_group=self.config.min_effective_group or self.config.num_generations / 2,
                group_size=self.config.num_generations,
            )
            rollouts = rollouts.replace(signals={**rollouts.signals, "group_scale": scale})
        anchor = self.anchor_logits(rollouts)
        target = target_distribution(scores, anchor, groups, candidates, target_temperature=self.config.eta)
        weights = group_softmax(anchor, groups, candidates)
        return rollouts.replace(
            target_weights=target,
            statistics={
                "group/effective_size": float(effective_group_size(weights, groups, candidates).mean()),
                "group/target_entropy": float(target_entropy(target, groups, candidates).mean()),
            },
        )

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """Cross-entropy of each group's weights to its target, averaged over groups; or the policy-gradient form."""
        if self.config.loss_type == "policy_gradient":
            return self.policy_gradient_loss(outputs, rollouts)
        logits = self.group_logits(outputs.logprobs, rollouts)
        losses = target_matching_loss(logits, rollouts.target_weights, rollouts.group_ids, rollouts.loss_rows)
        return LossOutput({"policy": LossTerm(losses.sum(), "group")})

    def policy_gradient_loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """`tpo_loss` on this micro-batch, with reused rollouts corrected by the probability ratio."""
        weight = probability_ratio(outputs.logprobs - rollouts.old_logprobs).detach()
        reference = outputs.logprobs.detach() if self.kl_coef == 0 else self.reference_logprobs(rollouts)
        mask = rollouts.loss_mask
        mean = self.tpo_loss(outputs.logprobs, reference, weight * rollouts.advantages, mask)
        return LossOutput({"policy": LossTerm(sum_from_mean(mean, mask), "token")})

    def tpo_loss(self, logp_online: Tensor, logp_target: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """The EMA-KL form: mean over valid tokens of -(advantage * logp_online) + beta * KL(online || target).

        Args:
            logp_online, logp_target, advantages, mask: `[batch, completion]`; garbage outside the mask is ignored.
        """
        exact = self.config.kl_estimator == "exact"
        return ema_kl_loss(
            logp_online,
            logp_target,
            advantages,
            mask,
            kl_coef=0.0 if exact else self.kl_coef,
            estimator=ESTIMATORS["k2" if exact else self.config.kl_estimator],
        )

    @property
    def kl_loss_coef(self) -> float:
        within_tpo_loss = self.config.loss_type == "policy_gradient" and self.config.kl_estimator != "exact"
        return 0.0 if within_tpo_loss else self.kl_coef

    def aggregate(self, per_token: Tensor, rollouts: Rollouts) -> LossTerm:
        """Beside target matching, per-token terms are summed, or averaged, over a completion as its logit is."""
        if self.config.loss_type == "policy_gradient":
            return super().aggregate(per_token, rollouts)
        reduce = masked_row_mean if self.config.group_logits == "averaged" else masked_row_sum
        return LossTerm(reduce(per_token, rollouts.loss_mask).sum(), "sequence")

    def standardise(self, rollouts: Rollouts) -> Tensor:
        """Scores of each group with mean 0 and, by default, population standard deviation 1; ties are exactly 0."""
        rewards, groups, rows = rollouts.rewards, rollouts.group_ids, rollouts.loss_rows
        if self.config.scale_rewards == "none":
            return group_mean_centred(rewards, groups, rows)
        scale = group_relative if self.config.scale_rewards == "group" else group_centred_batch_scaled
        return scale(rewards, groups, rows, correction=0 if self.config.group_std == "population" else 1)

    def group_logits(self, logprobs: Tensor, rollouts: Rollouts) -> Tensor:
        """A completion's logit within its group under some policy's log-probabilities, as `group_logits` says."""
        if self.config.group_logits == "logratio":
            logprobs = logprobs - rollouts.old_logprobs
        if self.config.group_logits == "averaged":
            return masked_row_mean(logprobs, rollouts.completion_mask)
        logits = masked_row_sum(logprobs, rollouts.completion_mask)
        return logits * rollouts.signals["group_scale"] if self.config.group_logits == "tempered" else logits

    def anchor_logits(self, rollouts: Rollouts) -> Tensor:
        """Group logits of the policy that the target is tilted from."""
        if not self.reads_old_logprobs:
            return rollouts.rewards.new_zeros(len(rollouts))  # the sampling policy's log-ratio to itself
        return self.group_logits(getattr(rollouts, f"{self.config.anchor}_logprobs"), rollouts)
