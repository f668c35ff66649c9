"""What the doctor remembers of a run: bounded, whatever the run's length, and plain enough for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from statistics import fmean, median
from typing import Any

from quintain.errors import DataError

RECENT_ROWS = 200
FIRST_ROWS = 10
EVALUATIONS = 100
HELDOUT_REWARD = ("eval/reward", "eval_reward")
"""Trackers separate evaluation by a slash, transformers' callbacks by an underscore."""


def step_noise(values: Sequence[float]) -> float:
    """Standard deviation of one step's value about its trend, from the differences between neighbours.

    Differences ignore a slow rise, which the plain standard deviation would count as noise.
    """
    differences = [later - earlier for earlier, later in pairwise(values)]
    return math.sqrt(fmean(d * d for d in differences) / 2) if differences else 0.0


class History:
    """The recent rows, the first rows, the best reward so far and the evaluations, with the run's settings."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.step = -1
        self.count = 0
        self.non_finite: list[str] = []
        self.best_reward: float | None = None
        """Highest 10-step median of the reward; a median, so that no single outlier sets an unreachable mark."""
        self.evaluations: list[list[float]] = []
        """[held-out reward, mean training reward of the last 10 steps] at each evaluation."""
        self._recent: list[dict[str, float]] = []
        self._first: list[dict[str, float]] = []

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take in one step's row; values that are not finite are named in `non_finite` and kept out of every series.

        None counts as not finite: JSON has no NaN, so metrics.jsonl holds null instead. A tensor of one element counts
        as its number.

        Raises:
            DataError: the row has no step number.
        """
        if not isinstance(metrics.get("step"), Real):
            raise DataError(f"a row of metrics needs a number under 'step'; got keys {sorted(metrics)}.")
        scalars = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
        numbers = {k: float(v) for k, v in scalars.items() if isinstance(v, Real) and not isinstance(v, bool)}
        row = {key: value for key, value in numbers.items() if math.isfinite(value)}
        missing = {key for key, value in metrics.items() if value is None}
        self.non_finite = sorted((numbers.keys() - row.keys()) | missing)
        self.step = int(row.pop("step"))
        self.count += 1
        self._recent = [*self._recent, row][-RECENT_ROWS:]
        if len(self._first) < FIRST_ROWS:
            self._first.append(row)
        self._mark_best()
        self._mark_evaluation(row)

    def recent(self, key: str, steps: int = RECENT_ROWS) -> list[float]:
        """The last `steps` values of a metric, oldest first; fewer if it was logged less often."""
        return [values[0] for values in self.table(key)][-steps:] if steps > 0 else []

    def table(self, *keys: str, rows: int = RECENT_ROWS) -> list[list[float]]:
        """These metrics side by side, from those of the last `rows` rows that have all of them, oldest first."""
        return [[row[key] for key in keys] for row in self._recent[-rows:] if row.keys() >= set(keys)]

    def first(self, key: str) -> list[float]:
        """A metric's values in the run's first ten rows."""
        return [row[key] for row in self._first if key in row]

    def typical(self, key: str, steps: int) -> float | None:
        """Median of the last `steps` values, or None while there are fewer."""
        values = self.recent(key, steps)
        return median(values) if len(values) == steps else None

    def setting(self, name: str, default: float) -> float:
        """A numeric setting; `default` where it is absent or None."""
        value = self.settings.get(name)
        return default if value is None else float(value)

    @property
    def policy_steps(self) -> int:
        """Rows in which the policy learnt: those after the `value_warmup_steps` that train the value model alone."""
        return max(self.count - int(self.setting("value_warmup_steps", 0)), 0)

    @property
    def steps_since_warmup(self) -> float:
        """Rows in which the policy learnt at a learning rate that had reached its height."""
        return min(self.count - self._warmup("warmup_steps"), self.policy_steps)

    @property
    def steps_since_value_warmup(self) -> float:
        """Rows seen since the value model's learning rate reached its height."""
        own = self.settings.get("value_lr_warmup_steps") is not None
        return self.count - self._warmup("value_lr_warmup_steps" if own else "warmup_steps")

    def _warmup(self, name: str) -> float:
        """A length of warm-up in steps; below 1 it is a share of `max_steps`."""
        warmup = self.setting(name, 0)
        return warmup * max(self.setting("max_steps", 0), 0) if warmup < 1 else warmup

    @property
    def reuses_rollouts(self) -> bool:
        """Whether a rollout serves more than one optimizer step. If not, ratios are 1 and nothing is ever clipped."""
        return self.setting("num_epochs", 1) * self.setting("num_mini_batches", 1) > 1

    def reward_rise(self) -> tuple[float, float]:
        """Mean reward of the last 20 steps less that of the first 10, and the standard error of that difference."""
        early, late = self.first("reward"), self.recent("reward", 20)
        if not early or not late:
            return 0.0, 0.0
        error = step_noise(self.recent("reward")) * math.sqrt(1 / len(early) + 1 / len(late))
        return fmean(late) - fmean(early), error

    @property
    def has_learnt(self) -> bool:
        """Whether the reward has risen by more than two standard errors."""
        rise, error = self.reward_rise()
        return rise > 2 * error

    def _mark_best(self) -> None:
        now = self.typical("reward", 10)
        if now is not None and (self.best_reward is None or now > self.best_reward):
            self.best_reward = now

    def _mark_evaluation(self, row: Mapping[str, float]) -> None:
        trained = self.recent("reward", 10)
        heldout = next((row[key] for key in HELDOUT_REWARD if key in row), None)
        if heldout is not None and trained:
            self.evaluations = [*self.evaluations, [heldout, fmean(trained)]][-EVALUATIONS:]

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "count": self.count,
            "best_reward": self.best_reward,
            "evaluations": [list(pair) for pair in self.evaluations],
            "recent": [dict(row) for row in self._recent],
            "first": [dict(row) for row in self._first],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.count = state["count"]
        self.best_reward = state["best_reward"]
        self.evaluations = [list(pair) for pair in state["evaluations"]]
        self._recent = [dict(row) for row in state["recent"]]
        self._first = [dict(row) for row in state["first"]]
