"""Reading a run's folder back: its metrics, its configuration, its JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quintain.errors import DataError


@dataclass(frozen=True)
class Metrics:
    """A run's rows in order of step, and how many lines of the file could not be read."""

    rows: list[dict[str, Any]]
    damaged_lines: int


def read_json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's object; None for a line that is not one, such as the last line of a run that was killed."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                value = None
            yield value if isinstance(value, dict) else None


def read_metrics(run: Path) -> Metrics:
    """The rows of `metrics.jsonl`, one a step.

    Lines of one step become one row. Where a step number goes back, the run was resumed from an earlier checkpoint:
    the rows it had written beyond that point belong to a future that did not happen, and are dropped.

    Raises:
        DataError: the folder holds no metrics.jsonl.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"no metrics.jsonl in {run}: give the output_dir of a run that has trained at least one step.")
    rows: dict[float, dict[str, Any]] = {}
    damaged = 0
    for row in read_json_lines(path):
        if row is None or not isinstance(row.get("step"), (int, float)):
            damaged += 1
            continue
        step = row["step"]
        if rows and step < max(rows):
            rows = {earlier: kept for earlier, kept in rows.items() if earlier < step}
        rows[step] = {**rows.get(step, {}), **row}
    return Metrics(list(rows.values()), damaged)


def read_config(run: Path) -> dict[str, Any]:
    """The mapping in `config.yaml`.

    Raises:
        DataError: the file is missing or is not a YAML mapping.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise DataError(f"no config.yaml in {run}: without the run's settings its metrics cannot be judged.")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise DataError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} must hold a mapping of settings, got {type(config).__name__}.")
    return config
