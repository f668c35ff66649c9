"""A run's folder as the report needs it. Only metrics.jsonl must exist; what else is missing is said on the page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from quintain.errors import DataError
from quintain.monitor.health import Doctor
from quintain.monitor.runs import read_config, read_json_lines, read_metrics

EDGE_STEPS = 5
"""Steps averaged into the first and the last reward."""
SHOWN_COMPLETIONS = 4


@dataclass(frozen=True)
class Snapshot:
    """Some completions of one step, best first."""

    step: int
    rows: list[dict[str, Any]]
    total: int


@dataclass(frozen=True)
class RunRecord:
    """What one run left behind."""

    folder: Path
    name: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    findings: list[dict[str, Any]]
    snapshots: list[Snapshot]
    remarks: list[str] = field(default_factory=list)
    """What could not be read."""

    @cached_property
    def keys(self) -> set[str]:
        """Metrics with at least one number."""
        return {key for row in self.rows for key in row if math.isfinite(self.number(row, key))}

    @property
    def reuses_rollouts(self) -> bool:
        return (self.config.get("num_epochs") or 1) * (self.config.get("num_mini_batches") or 1) > 1

    def has(self, key: str) -> bool:
        return key in self.keys

    @staticmethod
    def number(row: dict[str, Any], key: str) -> float:
        """The row's value, NaN where it is not a number."""
        value = row.get(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of the rows that hold the metric; NaN where it was not finite."""
        rows = [row for row in self.rows if key in row]
        return [row["step"] for row in rows], [self.number(row, key) for row in rows]

    def finite(self, key: str) -> list[float]:
        return [value for value in self.series(key)[1] if math.isfinite(value)]

    @property
    def seconds(self) -> float:
        """Time of all steps together."""
        return sum(self.finite("time/step")) or sum(
            value for key in self.keys if key.startswith("time/") for value in self.finite(key)
        )

    @property
    def reward_edges(self) -> tuple[float, float, float] | None:
        """Mean reward of the first steps, of the last steps, and the standard error of their difference."""
        rewards = self.finite("reward")
        size = min(EDGE_STEPS, len(rewards) // 2)
        if size < 1:
            return None
        first, last = rewards[:size], rewards[-size:]
        error = math.sqrt((variance(first) + variance(last)) / size) if size > 1 else math.nan
        return fmean(first), fmean(last), error


def read_run(folder: Path, name: str) -> RunRecord:
    """Read a run's folder.

    Raises:
        DataError: the folder holds no metrics.jsonl, or config.yaml is not a mapping.
    """
    metrics, remarks = read_metrics(folder), []
    if metrics.damaged_lines:
        remarks.append(
            f"Lines of metrics.jsonl that could not be read: {metrics.damaged_lines} (a killed run leaves half a line)."
        )
    if not metrics.rows:
        remarks.append("No step has been recorded yet.")
    config: dict[str, Any] = {}
    if (folder / "config.yaml").is_file():
        config = read_config(folder)
    else:
        remarks.append("config.yaml is missing.")
    findings = _findings(folder, metrics.rows, config, remarks)
    snapshots = _snapshots(folder / "completions.jsonl", remarks)
    return RunRecord(folder, name, metrics.rows, config, findings, snapshots, remarks)


def _findings(
    folder: Path, rows: list[dict[str, Any]], config: dict[str, Any], remarks: list[str]
) -> list[dict[str, Any]]:
    """The run's own findings; where it kept none, the doctor's on its metrics."""
    path = folder / "findings.jsonl"
    if path.is_file():
        lines = list(read_json_lines(path))
        if None in lines:
            remarks.append("Some lines of findings.jsonl could not be read.")
        return [line for line in lines if line is not None]
    if not config:
        remarks.append("Without config.yaml and findings.jsonl the doctor has nothing to say.")
        return []
    doctor = Doctor(config)
    return [dict(vars(finding)) for row in rows for finding in doctor.observe(row)]


def _snapshots(path: Path, remarks: list[str]) -> list[Snapshot]:
    """Completions of the first, the middle and the last step. Reads the file twice rather than hold it in memory."""
    if not path.is_file():
        remarks.append("No completions were logged (completions.jsonl is missing).")
        return []
    steps = sorted({row["step"] for row in read_json_lines(path) if row and isinstance(row.get("step"), int)})
    if not steps:
        remarks.append("completions.jsonl holds no completion.")
        return []
    chosen: dict[int, list[dict[str, Any]]] = {step: [] for step in (steps[0], steps[len(steps) // 2], steps[-1])}
    for row in read_json_lines(path):
        if row and row.get("step") in chosen:
            chosen[row["step"]].append(row)
    return [Snapshot(step, _spread(rows), len(rows)) for step, rows in chosen.items()]


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few rows from the best to the worst by reward, unscored ones last."""
    ranked = sorted(rows, key=lambda row: -math.inf if row.get("reward") is None else row["reward"], reverse=True)
    if len(ranked) <= SHOWN_COMPLETIONS:
        return ranked
    return [ranked[i * (len(ranked) - 1) // (SHOWN_COMPLETIONS - 1)] for i in range(SHOWN_COMPLETIONS)]


def name_runs(folders: list[Path]) -> list[str]:
    """A short name for each folder: its last part, or as many parts as tell them apart.

    Raises:
        DataError: no folder is given, or one is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    if not paths or len(set(paths)) < len(paths):
        raise DataError(f"a report needs one or more different run folders; got {[str(path) for path in folders]}.")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names
