"""The checked boundary: what a reward function returned becomes finite numbers, or errors that name the row."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quintain.errors import RewardError
from quintain.rewards.call import CallTimeout

Score = float | list[float] | None
"""One completion's reward: a number, intermediate rewards that sum to it, or None for "not scored"."""

LARGEST = torch.finfo(torch.float32).max
"""Rewards are kept in float32; a number beyond its range counts as infinite."""


@dataclass
class Scores:
    """One function's verdict on a batch. A row in `failures` has no score."""

    rows: list[Score]
    failures: dict[int, RewardError] = field(default_factory=dict)

    @classmethod
    def failed(cls, number: int, error: RewardError) -> Scores:
        """No row has a score, all for the same reason."""
        return cls([None] * number, dict.fromkeys(range(number), error))


def read_batch(result: Any, name: str, number: int) -> Scores:
    """Check what a batch call returned: `number` entries, each a finite number, None or a list of finite numbers."""
    shape = tuple(result.shape) if isinstance(result, (torch.Tensor, np.ndarray)) else None
    entries = _plain(result)
    # A column of shape (n, 1) is refused: against a row of n numbers it would broadcast into n * n rewards.
    if shape not in (None, (number,)) or not isinstance(entries, (list, tuple)) or len(entries) != number:
        if shape is None:
            got = f"{len(entries)} entries" if isinstance(entries, (list, tuple)) else f"one {type(entries).__name__}"
        else:
            got = f"an array of shape {shape}"
        message = f"reward function '{name}' returned {got}, expected {number} numbers: one per completion, in order."
        return Scores.failed(number, RewardError(message))
    return read_rows(entries, name)


def read_rows(results: Sequence[Any], name: str) -> Scores:
    """Check one result a row; an exception in a row's place is that row's failure."""
    scores = Scores([None] * len(results))
    for row, result in enumerate(results):
        if isinstance(result, Exception):
            scores.failures[row] = call_failure(result, name, f"row {row}")
            continue
        try:
            scores.rows[row] = _read_score(result)
        except _NotAScore as refusal:
            scores.failures[row] = RewardError(
                f"reward function '{name}' returned {refusal} for row {row}, expected a finite number, a list of "
                "finite numbers (intermediate rewards), or None (not scored)."
            )
    return scores


def call_failure(error: Exception, name: str, where: str) -> RewardError:
    """The RewardError for an exception that came out of a reward function, which it keeps as its cause."""
    if isinstance(error, CallTimeout):
        failure = RewardError(
            f"reward function '{name}' did not return within reward_timeout={error.seconds:g} seconds ({where}). Raise "
            "reward_timeout, or make the function give up sooner."
        )
    else:
        failure = RewardError(f"reward function '{name}' raised {type(error).__name__} ({where}): {error}")
    failure.__cause__ = error
    return failure


class _NotAScore(Exception):
    """What was found where a reward should be."""


def _plain(result: Any) -> Any:
    """Tensors, arrays and series as lists of Python numbers, without a graph."""
    if isinstance(result, torch.Tensor):
        return result.detach().cpu().tolist()
    return result.tolist() if hasattr(result, "tolist") else result


def _read_score(result: Any) -> Score:
    result = _plain(result)
    if result is None:
        return None
    if not isinstance(result, (list, tuple)):
        return _read_number(result)
    if not result:
        raise _NotAScore("an empty list")
    return [_read_number(_plain(entry)) for entry in result]


def _read_number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        text = repr(value)
        raise _NotAScore(f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a float
        number = math.inf
    if not abs(number) <= LARGEST:
        raise _NotAScore(str(number))
    return number
