"""What a reward function is given: copies that it may change, and two functions to log with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from quintain.masking import valid_ids
from quintain.rewards.signature import SINGULAR, RewardFunction
from quintain.types import Rollouts


class ReadPosition:
    """The row that a function read last, shared by all row-aligned lists of one call."""

    row: int | None = None

    def describe(self, number: int) -> str:
        """What is known about where in a batch of `number` rows a call failed."""
        rows = f"rows 0 to {number - 1}"
        return f"{rows}, before it read any" if self.row is None else f"{rows}, the last it read was row {self.row}"


class RowList(list):  # type: ignore[type-arg]
    """A list that notes which entry was read last, so that an error in a batch call can say how far it got."""

    def __init__(self, entries: Iterable[Any], position: ReadPosition) -> None:
        super().__init__(entries)
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        for row, entry in enumerate(super().__iter__()):
            self._position.row = row
            yield entry

    def __getitem__(self, index: Any) -> Any:
        entry = super().__getitem__(index)
        if isinstance(index, int):
            self._position.row = index % len(self)
        return entry

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(super().__iter__()),)  # copied or sent to another process, it is a plain list


class RewardLog:
    """What reward functions log during one step, for the completions table and the metrics."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def log_extra(self, name: str, values: Sequence[Any]) -> None:
        """Add a column to the completions table, one entry a completion."""
        entries = list(values)
        if len(entries) != self.number:
            raise ValueError(f"log_extra({name!r}, ...) got {len(entries)} entries, expected {self.number}.")
        self.extra[name] = entries

    def log_row(self, row: int, name: str, value: Any) -> None:
        """`log_extra` as a `per_sample` function sees it: one entry, for its own row."""
        self.extra.setdefault(name, [None] * self.number)[row] = value

    def log_metric(self, name: str, value: float) -> None:
        """Add a number to the step's metrics; several under one name are averaged."""
        self._metrics.setdefault(name, []).append(float(value))

    @property
    def metrics(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}


def row_values(rollouts: Rollouts) -> dict[str, list[Any]]:
    """Everything that has one entry a completion, by keyword. A standard name wins over a column that shares it."""
    token_ids = valid_ids(rollouts.completion_ids, rollouts.completion_mask)
    standard: dict[str, list[Any]] = {
        "prompts": rollouts.prompts,
        "completions": rollouts.completions,
        "completion_ids": token_ids,
    }
    return {**rollouts.columns, **standard}


def batch_arguments(
    function: RewardFunction, rows: dict[str, list[Any]], trainer_state: Any, log: RewardLog, position: ReadPosition
) -> dict[str, Any]:
    """The keywords of a call that scores the whole batch."""
    # Entry by entry: a group's completions share one prompt object, and a change to one must not reach the others.
    aligned = {name: RowList(map(_own_copy, rows[name]), position) for name in rows if function.wants(name)}
    return {**aligned, **_unaligned(function, trainer_state, log.log_extra, log)}


def sample_arguments(
    function: RewardFunction, rows: dict[str, list[Any]], trainer_state: Any, log: RewardLog, row: int
) -> dict[str, Any]:
    """The keywords of a `per_sample` call for one row."""
    entries = {name: values[row] for name, values in rows.items()}
    entries |= {singular: entries[plural] for singular, plural in SINGULAR.items()}
    aligned = {name: _own_copy(entry) for name, entry in entries.items() if function.wants(name)}
    return {**aligned, **_unaligned(function, trainer_state, partial(log.log_row, row), log)}


def _own_copy(entry: Any) -> Any:
    """A copy that shares nothing that could be changed."""
    return entry if isinstance(entry, str) else copy.deepcopy(entry)


def _unaligned(
    function: RewardFunction, trainer_state: Any, log_extra: Callable[..., None], log: RewardLog
) -> dict[str, Any]:
    values = {"trainer_state": copy.copy(trainer_state), "log_extra": log_extra, "log_metric": log.log_metric}
    return {name: value for name, value in values.items() if function.wants(name)}
