"""The reward stage: call every reward function, check what it returned, combine the results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from quintain.errors import ConfigError, RewardError, nearest
from quintain.rewards.arguments import ReadPosition, RewardLog, batch_arguments, row_values, sample_arguments
from quintain.rewards.call import start_batch, start_samples
from quintain.rewards.checks import Scores, call_failure, read_batch, read_rows
from quintain.rewards.compose import clip_totals, combine, combine_intermediate, row_totals
from quintain.rewards.model import RewardModel
from quintain.rewards.registry import resolve_reward
from quintain.rewards.signature import STANDARD_KEYWORDS, RewardFunction, inspect_function, unique_names
from quintain.types import RewardOutput, Rollouts

logger = logging.getLogger(__name__)

ON_ERROR = ("raise", "unscored")


class RewardPipeline:
    """Scores completions with one or more reward functions or models.

    Args:
        reward_funcs: a callable, a sequence-classification model, the name of a built-in reward or of a reward model
            (Hub id or folder), a dotted path, or a list of these.
        weights: one finite number a function; all 1 if not given. A function of weight 0 is logged and changes nothing.
        columns: the dataset's columns; if known, missing ones are refused here rather than at the first call.
        processing_classes: a tokenizer for each reward model (None: its own); None for functions.
        on_reward_error: "raise", or "unscored": a failed call leaves its rows without that function's score. They are
            counted in the metric `rewards/{name}/errors`.
        reward_timeout: seconds that one call may take; None: no limit.
        reward_clip: lowest and highest total, or one number c for (-c, c); None: no limit. The metric
            `rewards/clipped_fraction` counts the totals outside.
    Raises:
        ConfigError: a setting is out of range, or a function cannot be called with what there is.
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        weights: Sequence[float] | None = None,
        columns: Iterable[str] | None = None,
        processing_classes: Any = None,
        on_reward_error: str = "raise",
        reward_timeout: float | None = None,
        reward_clip: float | tuple[float, float] | None = None,
    ) -> None:
        _check_settings(on_reward_error, reward_timeout)
        entries = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
        self.weights = _check_weights(weights, len(entries))
        callables = _as_callables(entries, processing_classes)
        self.functions = [inspect_function(item, name) for item, name in zip(callables, unique_names(callables))]
        self.on_reward_error = on_reward_error
        self.reward_timeout = reward_timeout
        self.reward_clip = _clip_bounds(reward_clip)
        self._warned: set[str] = set()
        self.check_columns(columns)

    def check_columns(self, columns: Iterable[str] | None) -> None:
        """Refuse a dataset that lacks a column which a function asks for; None says that the columns are not known.

        Raises:
            ConfigError: names the function and the column.
        """
        if columns is None:
            return
        columns = set(columns) - {"prompt"}  # functions get it as `prompts`
        for function in self.functions:
            function.check_columns(columns)
        for name in columns & set(STANDARD_KEYWORDS):
            logger.warning(
                "Reward functions get the sampled values under %r, not the dataset column of that name.", name
            )

    @property
    def names(self) -> list[str]:
        """Each function's name in the metrics, in order; no two are equal."""
        return [function.name for function in self.functions]

    def to(self, device: torch.device | str) -> RewardPipeline:
        """Move the reward models."""
        for function in self.functions:
            if isinstance(function.call, RewardModel):
                function.call.to(device)
        return self

    def score(self, rollouts: Rollouts, trainer_state: Any = None) -> RewardOutput:
        """Reward every completion.

        Raises:
            RewardError: a function failed or returned something other than one finite number (or None, or a list of
                intermediate rewards) a completion; names the function and the row, and keeps the original exception.
            ConfigError: a function asks for a column that the rollouts do not have.
        """
        for function in self.functions:
            function.check_columns(rollouts.columns)
        log = RewardLog(len(rollouts))
        rows = row_values(rollouts)
        # Started together, so that asynchronous functions run while the others are computed.
        pending = [self._start(function, rows, trainer_state, log) for function in self.functions]
        scores = [self._settle(function, wait(), log) for function, wait in zip(self.functions, pending)]
        return self._combine(scores, rollouts, log)

    def _start(
        self, function: RewardFunction, rows: dict[str, list[Any]], trainer_state: Any, log: RewardLog
    ) -> Callable[[], Scores]:
        """Begin a function's call, or its calls, and return what waits for its checked scores."""
        number, timeout, position = log.number, self.reward_timeout, ReadPosition()
        if function.concurrency:
            calls = [sample_arguments(function, rows, trainer_state, log, row) for row in range(number)]
            result = start_samples(function, calls, timeout)
        else:
            result = start_batch(function, batch_arguments(function, rows, trainer_state, log, position), timeout)

        def wait() -> Scores:
            try:
                returned = result()
            except Exception as error:
                return Scores.failed(number, call_failure(error, function.name, position.describe(number)))
            if function.concurrency:
                return read_rows(returned, function.name)
            return read_batch(returned, function.name, number)

        return wait

    def _settle(self, function: RewardFunction, scores: Scores, log: RewardLog) -> Scores:
        """Raise a function's first failure, or count its failed rows, as `on_reward_error` says."""
        if scores.failures:
            first = scores.failures[min(scores.failures)]
            if self.on_reward_error == "raise":
                raise first
            if function.name not in self._warned:
                self._warned.add(function.name)
                logger.warning("%s Such rows go unscored (on_reward_error='unscored'); said once.", first)
        if self.on_reward_error == "unscored":
            log.log_metric(f"rewards/{function.name}/errors", len(scores.failures))
        return scores

    def _combine(self, scores: Sequence[Scores], rollouts: Rollouts, log: RewardLog) -> RewardOutput:
        device = rollouts.completion_ids.device
        components = [row_totals(item.rows) for item in scores]
        totals, scored = combine(components, self.weights)
        parts = combine_intermediate([item.rows for item in scores], self.weights, rollouts.completion_mask.cpu())
        if self.reward_clip is not None:
            clipped, factor = clip_totals(totals, self.reward_clip)
            log.log_metric("rewards/clipped_fraction", (scored & (clipped != totals)).double().mean().item())
            totals, parts = clipped.where(scored, 0.0), None if parts is None else parts * factor[:, None]
        _refuse_overflow(totals, parts, self.names)
        return RewardOutput(
            rewards=totals.float().to(device),
            scored=scored.to(device),
            components={name: item.float().to(device) for name, item in zip(self.names, components)},
            token_rewards=None if parts is None else parts.float().to(device),
            metrics=log.metrics,
            extra=log.extra,
        )


def _refuse_overflow(
    totals: Float[Tensor, " batch"], parts: Float[Tensor, "batch completion"] | None, names: Sequence[str]
) -> None:
    """Raise RewardError where finite numbers, weighted and added up, leave the range of float32."""
    finite = totals.float().isfinite()
    if parts is not None:
        finite = finite & parts.float().isfinite().all(dim=1)
    for row in (~finite).nonzero().flatten().tolist():
        raise RewardError(
            f"the total reward of row {row}, the weighted sum of {', '.join(names)}, is beyond float32: "
            f"{totals[row].item():g}. Lower reward_weights or set reward_clip."
        )


def _as_callables(entries: Sequence[Any], processing_classes: Any) -> list[Callable[..., Any]]:
    """Names become the rewards they name, and models are wrapped."""
    tokenizers = processing_classes if isinstance(processing_classes, (list, tuple)) else [processing_classes]
    if processing_classes is None:
        tokenizers = [None] * len(entries)
    if len(tokenizers) != len(entries):
        raise ConfigError(
            f"reward_processing_classes must have one entry per reward function: got {len(tokenizers)}, and "
            f"reward_funcs has {len(entries)}. Use None for functions that need no tokenizer."
        )
    return [
        RewardModel(entry, tokenizer) if isinstance(entry, torch.nn.Module) else resolve_reward(entry, tokenizer)
        for entry, tokenizer in zip(entries, tokenizers)
    ]


def _check_weights(weights: Sequence[float] | None, number: int) -> list[float]:
    if number == 0:
        raise ConfigError("reward_funcs is empty: give at least one reward function or reward model.")
    if weights is None:
        return [1.0] * number
    if len(weights) != number:
        raise ConfigError(
            f"reward_weights must have one entry per reward function: reward_weights has {len(weights)}, reward_funcs "
            f"has {number}."
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"reward_weights must be finite: got {list(weights)}.")
    if not any(weights):
        raise ConfigError(f"reward_weights must not all be 0: got {list(weights)}, which leaves nothing to learn from.")
    return [float(weight) for weight in weights]


def _check_settings(on_reward_error: str, reward_timeout: float | None) -> None:
    if on_reward_error not in ON_ERROR:
        raise ConfigError(
            f"on_reward_error must be one of {', '.join(map(repr, ON_ERROR))}: got {on_reward_error!r}."
            f"{nearest(on_reward_error, ON_ERROR)}"
        )
    if reward_timeout is not None and not 0 < reward_timeout < math.inf:
        raise ConfigError(f"reward_timeout must be a positive number of seconds, or None: got {reward_timeout}.")


def _clip_bounds(reward_clip: float | tuple[float, float] | None) -> tuple[float, float] | None:
    if reward_clip is None:
        return None
    low, high = reward_clip if isinstance(reward_clip, (list, tuple)) else (-reward_clip, reward_clip)
    if not low < high or not math.isfinite(high - low):
        raise ConfigError(
            f"reward_clip must be (low, high) with low < high, or one positive number: got {reward_clip}."
        )
    return float(low), float(high)
