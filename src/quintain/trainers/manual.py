"""The manual way in, for people with their own environment loop: `generate`, `step`, `save_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from quintain.errors import ConfigError, RewardError, nearest
from quintain.rollout.engine import rollouts_from_tokens, validate_sampling
from quintain.trainers.evaluation import evaluate
from quintain.trainers.export import save_models, save_policy, save_value_model
from quintain.types import Prompts, Rollouts, SamplingParams

if TYPE_CHECKING:
    from quintain.monitor.statistics import StepStatistics
    from quintain.trainers.base import OnlineRLTrainer

Tokens: TypeAlias = Sequence[int] | Tensor

ALIASES = {"mean_reward": "reward", "clip_frac": "clip_fraction", "value_loss": "loss/value"}
"""Short keys of `step`'s result, and the metrics they stand for."""

GENERATION_NAMES = {
    "max_new_tokens": "max_completion_length",
    "min_new_tokens": "min_completion_length",
    "min_length": "min_completion_length",
    "eos_token_id": "stop_token_ids",
}
"""Names of transformers and TRL for fields of `SamplingParams`."""
ALWAYS_SO = {"do_sample": True, "return_prompt": False}
"""Options of TRL's `generate` that may be given, and the one value each may have."""


class ManualLoop:
    """Methods of `OnlineRLTrainer` that let the caller own the loop."""

    def generate(self: OnlineRLTrainer, queries: Sequence[Tokens | str], **generation_kwargs: Any) -> list[Tensor]:  # type: ignore[misc]
        """Sample one completion of each query from the online policy.

        Args:
            queries: token ids or texts, of any lengths; a single tensor of ids or a single text is one query.
            generation_kwargs: fields of `SamplingParams` to change for this call, such as `temperature`,
                `max_completion_length` (or `max_new_tokens`), `top_k`.
        Returns:
            The completion's token ids for each query, the stop token included.

        An override is what `train()` samples with, too.
        """
        sampling = changed_sampling(self.sampling, generation_kwargs)
        if isinstance(queries, str) or (isinstance(queries, Tensor) and queries.ndim == 1):
            queries = [queries]
        samples = self.engine.generate(self._token_ids(queries), sampling, self.generators["rollout"])
        return [ids[mask] for ids, mask in zip(samples.completion_ids, samples.completion_mask)]

    def step(  # type: ignore[misc]
        self: OnlineRLTrainer,
        queries: Sequence[Tokens | str],
        responses: Sequence[Tokens | str],
        scores: Sequence[float] | Tensor,
        *,
        group_ids: Sequence[int] | Tensor | None = None,
        sampling_logprobs: Sequence[Sequence[float] | Tensor] | None = None,
    ) -> dict[str, float]:
        """Learn from completions that were sampled and scored elsewhere; the same updates as one step of `train()`.

        Args:
            queries, responses: token ids or texts, one of each a completion; responses include their stop token.
            scores: one number a completion.
            group_ids: equal for completions of one prompt; by default, queries with the same tokens form a group.
            sampling_logprobs: of the response tokens under the policy that sampled, in nats, if that was not the online
                policy as it is now: ratios to it then correct for the difference (importance sampling, S17).
        Raises:
            ConfigError: the learning rate has fallen to 0, at the end of `max_steps`.
            RewardError: scores are not one finite number a response.
        Returns:
            The metrics of the step, with `mean_reward`, `clip_frac` and `value_loss` beside their full names.
        """
        if not any(self.optimizer.learning_rates().values()):
            raise ConfigError(
                f"step {self.run.step + 1} is past max_steps={self.max_steps}: the learning rate has fallen to 0. "
                f"Leave max_steps unset in a loop of your own, raise it, or set lr_scheduler_type='constant'."
            )
        query_ids = self._token_ids(queries)
        rollouts = rollouts_from_tokens(
            query_ids,
            self._token_ids(responses),
            self.processing_class,
            stop_token_ids=self.sampling.stop_token_ids,
            sampling_logprobs=sampling_logprobs,
        )
        rewards = torch.as_tensor([float(score) for score in scores], dtype=torch.float32)
        if len(rewards) != len(rollouts) or not bool(torch.isfinite(rewards).all()):
            raise RewardError(
                f"scores must be {len(rollouts)} finite numbers, one for each response: got {len(rewards)}, "
                f"{int((~torch.isfinite(rewards)).sum())} of them not finite. No weight was changed."
            )
        if group_ids is None:
            numbers: dict[tuple[int, ...], int] = {}
            group_ids = [numbers.setdefault(tuple(ids), len(numbers)) for ids in query_ids]
        rollouts = rollouts.replace(
            group_ids=torch.as_tensor(group_ids, dtype=torch.long),
            rewards=self.penalise(rewards, rollouts),
            scored=torch.ones(len(rollouts), dtype=torch.bool),
            excluded=~rollouts.stopped if self.config.mask_truncated_completions else None,
            on_policy=sampling_logprobs is None,
            old_logprobs=None if sampling_logprobs is None else rollouts.sampling_logprobs,
        ).to(self.accelerator.device)
        return self._row(self.fit(rollouts))

    def complete_by_hand(  # type: ignore[misc]
        self: OnlineRLTrainer, prompts: Prompts, num_generations: int
    ) -> Rollouts:
        """The completions that an overridden `generate` gives, as the rollouts of a step."""
        source = [index for index in range(len(prompts)) for _ in range(num_generations)]
        queries = [prompts.token_ids[index] for index in source]
        rollouts = rollouts_from_tokens(
            queries,
            self._token_ids(self.generate(queries)),
            self.processing_class,
            stop_token_ids=self.sampling.stop_token_ids,
            prompts=[prompts.prompts[index] for index in source],
            columns={name: [column[index] for index in source] for name, column in prompts.columns.items()},
        )
        return rollouts.replace(group_ids=torch.tensor(source))

    def save_model(self: OnlineRLTrainer, output_dir: str | Path | None = None) -> None:  # type: ignore[misc]
        """Write the policy and its tokenizer, an adapter merged into its base, so that `from_pretrained` loads them.

        Args:
            output_dir: a folder for the policy; by default the run's own, in which `train()` leaves the same:
                `model/`, an `adapter/` where there is one, and `value_model/` where there is a critic.
        """
        if not self.accelerator.is_main_process:
            return
        if output_dir is None:
            save_models(self, self.run.folder)
        else:
            save_policy(self, Path(output_dir))

    def save_value_model(self: OnlineRLTrainer, output_dir: str | Path) -> None:  # type: ignore[misc]
        """Write the critic as a sequence-classification model with one label, and the tokenizer.

        Raises:
            ConfigError: this trainer has no critic.
        """
        if self.policies.module.value_model is None:
            raise ConfigError(f"{type(self).__name__} has no value model to save. PPOTrainer has one.")
        if self.accelerator.is_main_process:
            save_value_model(self, Path(output_dir))

    def evaluate(self: OnlineRLTrainer) -> dict[str, float]:  # type: ignore[misc]
        """Mean reward over the evaluation prompts: `eval_reward`, and `eval_rewards/{name}/mean` for each function."""
        if self.eval_prompts is None or self.reward is None:
            raise ConfigError("evaluate() needs eval_dataset and reward_funcs. Pass both to the trainer.")
        return evaluate(self)

    def log_stats(self, stats: Mapping[str, float], *_ignored: Any, **_also_ignored: Any) -> None:
        """Print a step's main numbers, as `log_training_stats`."""
        log_training_stats(stats)

    def log_training_stats(self, stats: Mapping[str, float]) -> None:
        """The function of the same name, as a method."""
        log_training_stats(stats)

    def _row(self: OnlineRLTrainer, statistics: StepStatistics) -> dict[str, float]:  # type: ignore[misc]
        self.run.counter.step += 1
        self.optimizer.next_rate()
        row = {"step": self.run.step, **statistics.result()}
        return {**row, **{short: row[full] for short, full in ALIASES.items() if full in row}}

    def _token_ids(self: OnlineRLTrainer, items: Sequence[Tokens | str]) -> list[list[int]]:  # type: ignore[misc]
        ids = []
        for item in items:
            if isinstance(item, str):
                ids.append(list(self.processing_class(item, add_special_tokens=False)["input_ids"]))
            else:
                ids.append([int(token) for token in item])
        return ids


def changed_sampling(sampling: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """One completion a query, drawn as usual but for the given changes.

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    settings: dict[str, Any] = {"num_generations": 1}
    own = [name for name in SamplingParams.__dataclass_fields__ if name != "num_generations"]
    known = [*own, *GENERATION_NAMES, *ALWAYS_SO]
    for name, value in changes.items():
        if name not in known:
            raise ConfigError(f"generate() takes {', '.join(known)}: got {name!r}.{nearest(name, known)}")
        if name in ALWAYS_SO:
            if value != ALWAYS_SO[name]:
                raise ConfigError(f"generate() has no {name} but {ALWAYS_SO[name]}: got {value!r}. Leave it out.")
            continue
        field = GENERATION_NAMES.get(name, name)
        if field in settings:
            raise ConfigError(f"generate() got {field} twice, once by the name {name}. Give one of them.")
        if value is not None:
            settings[field] = value
    # What TRL's scripts write for "none": a length of -1, a stop token of -1, a top_k of 0.0.
    settings["min_completion_length"] = max(0, settings.get("min_completion_length", sampling.min_completion_length))
    if "stop_token_ids" in settings:
        ids = settings["stop_token_ids"]
        settings["stop_token_ids"] = tuple(token for token in ([ids] if isinstance(ids, int) else ids) if token >= 0)
    if settings.get("top_k") is not None:
        settings["top_k"] = int(settings["top_k"])
    changed = replace(sampling, **settings)
    validate_sampling(changed)
    return changed


def log_training_stats(stats: Mapping[str, float]) -> None:
    """Print step, mean reward, KL, clip fraction and value loss of one step, those that are there, on one line."""
    shown = []
    for label, names, form in (
        ("step", ("step",), "{:.0f}"),
        ("mean reward", ("mean_reward", "reward"), "{:.4f}"),
        ("KL", ("kl",), "{:.5f}"),
        ("clip fraction", ("clip_frac", "clip_fraction"), "{:.1%}"),
        ("value loss", ("value_loss", "loss/value"), "{:.4f}"),
    ):
        found = next((stats[name] for name in names if name in stats), None)
        if found is not None:
            shown.append(f"{label} {form.format(found)}")
    print("  ".join(shown))
