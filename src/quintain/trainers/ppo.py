"""PPO: a learned value baseline, per-token rewards with KL inside, clipped updates of policy and critic."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from quintain.advantages.gae import gae
from quintain.advantages.moments import RunningMoments
from quintain.advantages.token_rewards import at_last_token, per_token_rewards, spread_intermediate
from quintain.checkpoints.state import Stateful
from quintain.configs.algorithms import PPOConfig
from quintain.errors import ConfigError
from quintain.kl.estimators import ESTIMATORS
from quintain.masking import masked_whiten, sum_from_mean, whitening_scale
from quintain.monitor.statistics import explained_variance
from quintain.objectives.clip import (
    clipped_surrogate_from_ratio,
    clipped_tokens,
    clipped_value_loss,
    probability_ratio,
)
from quintain.rewards.compose import clip_totals
from quintain.trainers.base import OnlineRLTrainer
from quintain.trainers.contract import checked_advantages, checked_tokens
from quintain.types import LossOutput, LossTerm, PolicyOutputs, Rollouts

FORMER_NAMES = {"config": "args", "tokenizer": "processing_class", "dataset": "train_dataset"}
"""Arguments of TRL's first PPOTrainer, by their names now."""


class PPOTrainer(OnlineRLTrainer):
    """Proximal Policy Optimization (Schulman et al. 2017, arXiv:1707.06347) for language models.

    Each stage is a method to override: `generate`, `compute_rewards`, `compute_advantages`, `actor_loss`,
    `critic_loss`, `train_minibatch`.

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
        for old, new in FORMER_NAMES.items():
            if old in kwargs and new in kwargs:
                raise ConfigError(f"{old} is the former name of {new}, and both were given. Pass {new} only.")
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
        if reward_model is not None:
            given = [] if reward_funcs is None else reward_funcs
            reward_funcs = [*(given if isinstance(given, list | tuple) else [given]), reward_model]
        _refuse_a_trained_judge(model, kwargs.get("value_model"), reward_funcs)
        self.score_moments = RunningMoments()
        self.critic_arguments = len(inspect.signature(self.critic_loss).parameters)
        super().__init__(model, reward_funcs, *args, **kwargs)

    @property
    def kl_loss_coef(self) -> float:
        return self.config.kl_in_loss + self.kl_direct_coef

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

    @property
    def kl_loss_estimator(self) -> str:
        """In a loss, k1 gives way to k2: its expected gradient there is zero."""
        return "k2" if self.config.kl_estimator == "k1" else self.config.kl_estimator

    @property
    def parts(self) -> dict[str, Stateful]:
        return {"score_moments": self.score_moments} if self.config.scale_rewards == "running" else {}

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """Scores become per-token rewards, and these become advantages and returns."""
        mask = rollouts.loss_mask
        scores, token_rewards, statistics = self.scale_scores(rollouts)
        logprobs, ref_logprobs = self.logprobs_for_rewards(rollouts)
        # All tokens of a completion, also of one that is left out of the loss: a hook may look for the last of them.
        returned = self.compute_rewards(scores, logprobs, ref_logprobs, rollouts.completion_mask)
        rewards = per_token_rewards(returned, rollouts.completion_mask)
        if token_rewards is not None:
            rewards = spread_intermediate(rewards, token_rewards, mask)
        self.advantage_scale = reward_scale = 1.0
        if self.config.whiten_rewards:
            reward_scale = whitening_scale(rewards, mask)
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = checked_advantages(self.compute_advantages(rollouts.values, rewards, mask), mask, self)
        self.advantage_scale *= reward_scale
        statistics["explained_variance"] = explained_variance(rollouts.values, returns, mask)
        return rollouts.replace(advantages=advantages, returns=returns, statistics=statistics)

    def logprobs_for_rewards(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Log-probabilities under the sampling and the reference policy, `[batch, completion]`, copies.

        Under `kl_estimator="exact"` the second are such that the difference is the exact KL, so that every
        `compute_rewards` that subtracts them works.
        """
        old = rollouts.old_logprobs
        if rollouts.reference_kl is not None:
            return old.clone(), old - rollouts.reference_kl
        reference = getattr(rollouts, f"{self.config.reference_slot}_logprobs")
        return old.clone(), (old if reference is None else reference).clone()

    def scale_scores(self, rollouts: Rollouts) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """Scores `[batch]` by `scale_rewards` and `score_clip`, intermediate rewards by the same scale, and statistics.

        Intermediate rewards are divided as their total is; what the total is shifted by falls on the last token.
        """
        scores, parts, statistics = rollouts.rewards, rollouts.token_rewards, {}
        if self.config.scale_rewards != "none":
            moments = self.score_moments if self.config.scale_rewards == "running" else RunningMoments()
            moments.update(scores[rollouts.scored], self.sum_over_processes)
            scores = torch.where(rollouts.scored, (scores - moments.mean) * moments.scale, 0.0)
            parts = None if parts is None else parts * moments.scale
            statistics = {"score_mean": moments.mean, "score_std": moments.std}
        if self.config.score_clip is not None:
            clipped, factor = clip_totals(scores, (-self.config.score_clip, self.config.score_clip))
            statistics["score_clipped_fraction"] = float((clipped != scores).double().mean())
            scores, parts = clipped, None if parts is None else parts * factor[:, None]
        return scores, parts, statistics

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Per-token rewards: minus `kl_coef` times KL at every valid token, plus the score at the last one.

        Args:
            scores: `[batch]`.
            logprobs, ref_logprobs: `[batch, completion]`, of the sampling and the reference policy, in nats.
            masks: `[batch, completion]`, True on valid tokens; all valid if omitted.
        Returns:
            The rewards and the part of them that is not the score, both `[batch, completion]`, 0 outside the mask. An
            override has more freedom: see `per_token_rewards`.
        """
        masks = torch.ones_like(logprobs, dtype=torch.bool) if masks is None else masks
        # The exact KL, where that is asked for, is the difference already.
        estimator = "k1" if self.config.kl_estimator == "exact" else self.config.kl_estimator
        kl = ESTIMATORS[estimator](logprobs - ref_logprobs)
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
            self.advantage_scale = whitening_scale(advantages, mask)
            advantages = masked_whiten(advantages, mask)
        return advantages, returns

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """Actor and critic loss over the valid tokens, which the hooks receive flat."""
        assert outputs.values is not None  # every PPOTrainer has a value model
        mask = rollouts.loss_mask
        ratio = probability_ratio((outputs.logprobs - rollouts.old_logprobs)[mask])
        advantages = rollouts.advantages[mask]
        actor = self.actor_loss(ratio, advantages)
        values = (outputs.values[mask], rollouts.returns[mask], rollouts.values[mask])
        critic = self.critic_loss(*values[: self.critic_arguments])
        clipped = clipped_tokens(ratio.detach(), advantages, **self.clip_bounds)
        return LossOutput(
            {
                "policy": self.token_sum("actor_loss", actor, mask),
                "value": self.weighted(self.config.vf_coef, self.token_sum("critic_loss", critic, mask)),
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
        """Half the larger of the clipped and unclipped squared errors, `[tokens]`; an override may return the mean.

        An override may also do without `old_values`, and take values and returns alone.
        """
        return clipped_value_loss(values, old_values, returns, clip_range=self.config.cliprange_value)

    @property
    def cliprange(self) -> float:
        """Half-width of the interval around ratio 1, for overrides of `actor_loss`."""
        return self.config.cliprange

    @property
    def clip_bounds(self) -> dict[str, Any]:
        return {"clip_range": self.config.cliprange, "dual_clip": self.config.dual_clip}

    def token_sum(self, hook: str, losses: Tensor, mask: Tensor) -> LossTerm:
        """A hook's result as a sum over tokens, whether it returned each token's loss or their mean."""
        losses = checked_tokens(losses, int(mask.sum()), self, hook)
        return LossTerm(sum_from_mean(losses, mask) if losses.ndim == 0 else losses.sum(), "token")


def _refuse_a_trained_judge(model: Any, value_model: Any, reward_funcs: Any) -> None:
    """A model that is trained cannot be the one that scores as well: its scores would follow the training."""
    judges = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    for name, trained in (("model", model), ("value_model", value_model)):
        if isinstance(trained, nn.Module) and any(trained is judge for judge in judges):
            raise ConfigError(
                f"the {type(trained).__name__} given as {name} is a reward model too, and would be trained while it "
                f"scores. Load it a second time, or pass a copy: copy.deepcopy({name})."
            )
