"""The loop. `run_step` and `fit` are one training step, top to bottom; an algorithm fills in `estimate` and `loss`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from quintain.checkpoints.state import Stateful
from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError
from quintain.masking import masked_sum
from quintain.monitor.statistics import StepStatistics, reward_statistics, rollout_statistics
from quintain.rollout.engine import build_rollouts
from quintain.trainers.assembly import Assembly
from quintain.trainers.contract import check_algorithm, checked_estimate, checked_loss
from quintain.trainers.first_update import FirstUpdateCheck, coarsest_precision
from quintain.trainers.kl_terms import KLTerms
from quintain.trainers.manual import ManualLoop
from quintain.trainers.processes import AcrossProcesses
from quintain.trainers.run import Run
from quintain.types import LossOutput, LossTerm, PolicyOutputs, Prompts, Rollouts, SamplingParams, Unit

_log = logging.getLogger(__name__)


class OnlineRLTrainer(KLTerms, ManualLoop, AcrossProcesses):
    """Sample completions, score them, move the policy.

    A named trainer is a subclass that says how rewards become a training signal (`estimate`) and what the loss is
    (`loss`). It owns no loop, device, data or checkpoint.

    Args:
        model: Hub id, folder, .gguf file, "pkg:..." or "scratch:..." reference, or a loaded causal language model.
        reward_funcs: a callable, a reward-model id or module, or a list of these.
        args: the algorithm's config; its defaults when omitted.
        train_dataset: a `datasets` dataset or a list of dicts, with a "prompt" column of text or chat messages.
        eval_dataset: likewise; needed when `eval_steps` is set.
        processing_class: the tokenizer; found from the model when omitted.
        reward_processing_classes: tokenizers of reward models, in the order of `reward_funcs`.
        callbacks: objects with the methods of `transformers.TrainerCallback`.
        optimizers: an optimizer and a schedule to use instead of those the config describes.
        peft_config: a PEFT configuration; the model is wrapped and only the adapter is trained.
    Raises:
        ConfigError, DataError: settings or data that cannot work, before the model is loaded where possible.
    """

    config_class: ClassVar[type[OnlineRLConfig]] = OnlineRLConfig
    unit: Unit = "token"
    """What a split into mini-batches and micro-batches keeps whole."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: OnlineRLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        *,
        ref_model: Any = None,
        value_model: Any = None,
    ) -> None:
        if isinstance(model, OnlineRLConfig):
            raise ConfigError(
                f"{type(self).__name__} takes its arguments in the order model, reward_funcs, args: got a "
                f"{type(model).__name__} as model. Pass it by name: args=..."
            )
        self.args = self.config = self.config_class() if args is None else args
        if not isinstance(self.config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} takes args of type {self.config_class.__name__}: "
                f"got {type(self.config).__name__}."
            )
        self.check()
        parts = Assembly(
            self,
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            optimizers=optimizers,
            peft_config=peft_config,
            ref_model=ref_model,
            value_model=value_model,
        )
        self.accelerator = parts.accelerator
        self.model, self.processing_class = parts.model, parts.tokenizer
        self.sampling: SamplingParams = parts.sampling
        self.prompts, self.engine, self.reward = parts.prompts, parts.engine, parts.reward
        self.policies, self.optimizer = parts.policies, parts.optimizer
        self.generators, self.kl_controller = parts.generators, parts.kl_controller
        self.eval_prompts = parts.eval_prompts
        self.max_steps = parts.max_steps
        precision = coarsest_precision(self.config.dtype, self.model)
        self.first_update = FirstUpdateCheck(self.engine, precision, untrained=ref_model is None)
        self.run = Run(self, list(callbacks or []))

    # ---- the step -------------------------------------------------------------------------------------------------

    def train(self, resume_from: str | Path | None = None, *, resume_from_checkpoint: str | Path | None = None) -> None:
        """Run `max_steps` training steps, then save the policy to `output_dir/model`.

        Args:
            resume_from: a run's folder, or one of its checkpoints; training goes on as if it had never stopped.
            resume_from_checkpoint: the same, by its name in TRL.
        """
        with self.run.session(resume_from or resume_from_checkpoint):
            while self.run.step < self.max_steps and not self.run.stopping:
                self.run.finish_step(self.run_step())

    def run_step(self) -> StepStatistics:
        """Sample, score, fit: one step of training."""
        statistics = StepStatistics()
        with statistics.timed("rollout"):
            rollouts = self.generate_rollouts()
        with statistics.timed("reward"):
            rollouts = self.score(rollouts)
        return self.fit(rollouts, statistics)

    def fit(self, rollouts: Rollouts, statistics: StepStatistics | None = None) -> StepStatistics:
        """Turn scored rollouts into updates. `step(queries, responses, scores)`, the manual way in, ends here too."""
        statistics = statistics or StepStatistics()
        with statistics.timed("annotate"):
            rollouts = self.policies.annotate(rollouts, old=self.records_old_logprobs, keep=self.unit)
            rollouts = checked_estimate(self.estimate(rollouts), self)
        with statistics.timed("fit"):
            for minibatch in self.minibatches(rollouts, statistics):
                self.train_minibatch(minibatch, statistics)
        return self.describe(rollouts, statistics)

    def train_minibatch(self, minibatch: Rollouts, statistics: StepStatistics) -> None:
        """One optimizer step: losses are sums over micro-batches, divided here by the mini-batch's counts."""
        counts = {unit: self.sum_over_processes(minibatch.count(unit)) for unit in ("token", "sequence", "group")}
        losses: dict[str, float] = {}
        statistics.mark("minibatch")
        for micro in self.policies.micro_batches(minibatch, self.unit):
            outputs = self.policies.online(micro)
            micro = self.with_old_logprobs(micro, outputs)
            statistics.add_means(self.first_update.observe(outputs, micro))
            loss = checked_loss(self.loss(outputs, micro), self)
            terms = {**loss.terms, **self.regularisers(outputs, micro, statistics)}
            means = {name: term.total / max(counts[term.unit], 1) for name, term in terms.items()}
            self.accelerator.backward(torch.stack(list(means.values())).sum())
            losses = {name: losses.get(name, 0.0) + float(mean.detach()) for name, mean in means.items()}
            statistics.observe_policy(outputs, micro)
            statistics.add(loss)
        left_out = self.ran_away(statistics)
        statistics.add_losses(losses, self.optimizer.step(leave_out=left_out))
        self.first_update.disarm()
        if not left_out:
            self.maybe_update_target()

    def maybe_update_target(self) -> None:
        """Move the target policy; called once after every optimizer step."""
        self.policies.after_step()

    # ---- what an algorithm fills in -------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what this trainer cannot do, before anything is loaded. An extension calls this one."""
        check_algorithm(type(self), OnlineRLTrainer)

    def estimate(self, rollouts: Rollouts) -> Rollouts:
        """Turn rewards into a training signal: advantages, or whatever `loss` reads. Runs once a rollout."""
        raise NotImplementedError

    def loss(self, outputs: PolicyOutputs, rollouts: Rollouts) -> LossOutput:
        """The loss of one micro-batch as sums, each naming the unit it will be averaged over."""
        raise NotImplementedError

    @property
    def slots(self) -> set[str]:
        """Which policies besides the online one exist in this run, of "ref", "old" and "target"."""
        slots = {"target"} if self.config.use_target_policy else set()
        if self.config.kl_weight > 0:
            slots.add(self.config.reference_slot)
        return slots

    @property
    def parts(self) -> dict[str, Stateful]:
        """What of this algorithm's own decides the run's future, by name: saved in every checkpoint, and restored."""
        return {}

    @property
    def reads_old_logprobs(self) -> bool:
        """Whether `estimate` needs the sampling policy's log-probabilities (the loss always has them)."""
        return self.kl_reward_coef > 0

    def aggregate(self, per_token: Tensor, rollouts: Rollouts) -> LossTerm:
        """How per-token losses become a term: by default their sum, to be averaged over tokens."""
        return LossTerm(masked_sum(per_token, rollouts.loss_mask), "token")

    # ---- shared pieces --------------------------------------------------------------------------------------------

    def generate_rollouts(self) -> Rollouts:
        """Draw the next prompts and complete each `num_generations` times."""
        assert self.prompts is not None  # train() has checked
        generator = self.generators.fork("rollout", self.accelerator.process_index)
        return self.complete(self.prompts.next_batch(), self.sampling, generator)

    def complete(self, prompts: Prompts, sampling: SamplingParams, generator: torch.Generator) -> Rollouts:
        """Sample completions of the given prompts from the online policy."""
        if type(self).generate is not ManualLoop.generate:
            return self.complete_by_hand(prompts, sampling.num_generations).to(self.accelerator.device)
        samples = self.engine.generate(prompts.token_ids, sampling, generator)
        rollouts = build_rollouts(prompts, samples, self.processing_class, sampling.num_generations)
        return rollouts.to(self.accelerator.device)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Ask the reward functions, and apply the penalties that do not depend on text."""
        assert self.reward is not None  # train() has checked
        rollouts = rollouts.to("cpu")  # reward functions see text and lists; what they return is added up there
        output = self.reward.score(rollouts, self.run.state)
        return rollouts.replace(
            rewards=self.penalise(output.rewards, rollouts),
            scored=output.scored,
            token_rewards=output.token_rewards,
            reward_output=output,
            excluded=~rollouts.stopped if self.config.mask_truncated_completions else None,
        ).to(self.accelerator.device)

    def penalise(self, rewards: Tensor, rollouts: Rollouts) -> Tensor:
        """`missing_eos_penalty` for cut-off completions and `length_penalty` in proportion to length."""
        config = self.config
        if config.missing_eos_penalty:
            rewards = rewards - config.missing_eos_penalty * (~rollouts.stopped).to(rewards.dtype)
        if config.length_penalty:
            rewards = rewards - config.length_penalty * rollouts.lengths / config.max_completion_length
        return rewards

    @property
    def records_old_logprobs(self) -> bool:
        """A rollout used for one update needs no separate pass: the update's own forward pass is the old policy's."""
        return self.config.num_epochs * self.config.num_mini_batches > 1 or self.reads_old_logprobs

    def with_old_logprobs(self, rollouts: Rollouts, outputs: PolicyOutputs) -> Rollouts:
        """Fill in the old log-probabilities where the policy has not moved since it sampled."""
        if rollouts.old_logprobs is not None:
            return rollouts
        return rollouts.replace(old_logprobs=outputs.logprobs.detach().clone())

    def minibatches(self, rollouts: Rollouts, statistics: StepStatistics):  # type: ignore[no-untyped-def]
        """The mini-batches of every epoch; `stop_kl` ends the epochs once one has found the policy that far away."""
        self.first_update.arm(on_policy=rollouts.on_policy)
        limit = self.config.stop_kl
        for epoch in range(self.config.num_epochs):
            if epoch and limit and self.mean_over_processes(statistics.mean_since("epoch", "kl") or 0.0) > limit:
                statistics.set(epochs_skipped=self.config.num_epochs - epoch)
                return
            statistics.mark("epoch")
            yield from rollouts.minibatches(self.config.num_mini_batches, self.unit, self.generators["minibatch"])

    def ran_away(self, statistics: StepStatistics) -> bool:
        """Whether the mini-batch just computed is so far from the sampling policy that its update must be left out."""
        threshold = self.config.ratio_threshold
        if threshold is None:
            return False
        ratio = self.mean_over_processes(statistics.mean_since("minibatch", "ratio_mean") or 0.0)
        statistics.count("updates_skipped", float(ratio > threshold))
        if ratio > threshold:
            _log.warning(
                "step %d: an update was left out, because its mean probability ratio is %.3g (ratio_threshold %g). "
                "The policy has run away from the one that sampled: lower learning_rate or num_epochs if this recurs.",
                self.run.step + 1,
                ratio,
                threshold,
            )
        return ratio > threshold

    def regularisers(
        self, outputs: PolicyOutputs, rollouts: Rollouts, statistics: StepStatistics
    ) -> dict[str, LossTerm]:
        """Terms any algorithm may have: KL to the reference policy, and an entropy bonus."""
        terms = {}
        if self.kl_loss_coef > 0:
            kl, mask = self.kl_to_reference(outputs, rollouts), rollouts.loss_mask
            terms["kl"] = self.weighted(self.kl_loss_coef, self.aggregate_kl(kl, rollouts))
            statistics.add_means({f"loss_kl/{self.kl_loss_estimator}": (masked_sum(kl, mask), mask.sum())})
        if self.config.entropy_coef:
            terms["entropy"] = self.weighted(-self.config.entropy_coef, self.aggregate(outputs.entropy, rollouts))
        return terms

    @staticmethod
    def weighted(coefficient: float, term: LossTerm) -> LossTerm:
        return LossTerm(coefficient * term.total, term.unit)

    def describe(self, rollouts: Rollouts, statistics: StepStatistics) -> StepStatistics:
        """Add the numbers of the rollout itself, and let the KL controller see the step."""
        statistics.update(reward_statistics(rollouts))
        statistics.update(rollout_statistics(rollouts, self.config.max_completion_length))
        statistics.update(rollouts.statistics)
        statistics.update(self.optimizer.learning_rates())
        statistics.set(kl_coef=self.kl_coef)
        if self.kl_reward_coef > 0:
            kl, mask = self.kl_in_rewards(rollouts), rollouts.loss_mask
            statistics.add_means({f"reward_kl/{self.config.kl_estimator}": (masked_sum(kl, mask), mask.sum())})
        statistics.rollouts = rollouts
        self.update_kl_coefficient(rollouts, statistics)
        return statistics


OnlineRLTrainerBase = OnlineRLTrainer
