"""KL to the reference policy: in rewards, in the loss or both, and the coefficient that weighs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from quintain.errors import RolloutError
from quintain.kl.estimators import ESTIMATORS
from quintain.types import LossTerm, PolicyOutputs, Rollouts

if TYPE_CHECKING:
    from quintain.monitor.statistics import StepStatistics
    from quintain.trainers.base import OnlineRLTrainer


class KLTerms:
    """Methods of `OnlineRLTrainer` about KL to the reference policy; an algorithm says by which of them it is held."""

    advantage_scale: float = 1.0
    """What whitening multiplied the advantages of the rollout in use by; an `estimate` that whitens sets it."""

    @property
    def kl_coef(self: OnlineRLTrainer) -> float:  # type: ignore[misc]
        """The KL coefficient now in force."""
        return self.kl_controller.value

    @property
    def kl_loss_coef(self: OnlineRLTrainer) -> float:  # type: ignore[misc]
        """Weight of KL to the reference policy as a term of the loss."""
        return self.kl_coef

    @property
    def kl_reward_coef(self: OnlineRLTrainer) -> float:  # type: ignore[misc]
        """Weight of KL to the reference policy as a part of the reward, for an `estimate` that subtracts it."""
        return 0.0

    @property
    def kl_direct_coef(self: OnlineRLTrainer) -> float:  # type: ignore[misc]
        """Weight in the loss of the exact KL that is part of the reward.

        Exact KL at a token is a sum over all that might have been drawn there, so no draw can be credited with it: as a
        reward it speaks to earlier tokens only. Its own gradient comes through the loss, on the scale that advantages
        have there.
        """
        return self.kl_reward_coef * self.advantage_scale if self.config.kl_estimator == "exact" else 0.0

    @property
    def kl_loss_estimator(self: OnlineRLTrainer) -> str:  # type: ignore[misc]
        """Which estimate of KL a loss uses."""
        return self.config.kl_estimator

    def kl_to_reference(self: OnlineRLTrainer, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:  # type: ignore[misc]
        """Per-token KL of the online policy to the reference slot, for the loss; 0 outside the mask."""
        if outputs.exact_kl is not None:
            return outputs.exact_kl
        return ESTIMATORS[self.kl_loss_estimator](outputs.logprobs - self.reference_logprobs(rollouts))

    def kl_in_rewards(self: OnlineRLTrainer, rollouts: Rollouts) -> Tensor:  # type: ignore[misc]
        """Per-token KL of the sampling policy to the reference slot, for rewards; 0 outside the mask."""
        if rollouts.reference_kl is not None:
            return rollouts.reference_kl
        return ESTIMATORS[self.config.kl_estimator](rollouts.old_logprobs - self.reference_logprobs(rollouts))

    def reference_logprobs(self: OnlineRLTrainer, rollouts: Rollouts) -> Tensor:  # type: ignore[misc]
        """Log-probabilities under the policy that KL is measured against."""
        slot = self.config.reference_slot
        found = getattr(rollouts, f"{slot}_logprobs")
        if found is None:
            raise RolloutError(f"the rollouts carry no {slot}_logprobs: policies.annotate did not run on them")
        return found

    def aggregate_kl(self: OnlineRLTrainer, per_token: Tensor, rollouts: Rollouts) -> LossTerm:  # type: ignore[misc]
        """The same for KL to the reference policy."""
        return self.aggregate(per_token, rollouts)

    def update_kl_coefficient(self: OnlineRLTrainer, rollouts: Rollouts, statistics: StepStatistics) -> None:  # type: ignore[misc]
        """Let an adaptive controller see the KL a completion of this step, in nats."""
        name = {"ref": "ref_kl", "target": "target_kl_gap", "old": "kl"}[self.config.reference_slot]
        per_token = statistics.mean(name)
        if per_token is not None and not self.optimizer.policy_stands_still:
            kl = self.mean_over_processes(per_token * float(rollouts.lengths.float().mean()))
            self.kl_controller.update(kl, int(self.sum_over_processes(len(rollouts))))
