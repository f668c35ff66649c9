"""A run's own record: metrics.jsonl, completions.jsonl and findings.jsonl, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
FINDINGS = "findings.jsonl"


class JsonlTracker:
    """Appends every step to the run's folder, on disk before the next step begins.

    Args:
        folder: the run's folder; made if missing.
        start_step: steps already done. Rows of later steps, left by an interrupted run, are removed first, so that
            no step is there twice; 0 starts every file afresh.
    """

    def __init__(self, folder: str | Path, start_step: int = 0) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}
        for name in (METRICS, COMPLETIONS, FINDINGS):
            _keep_until(self.folder / name, start_step)
            (self.folder / name).touch()  # a run without findings has an empty file, not a missing one

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row to metrics.jsonl. JSON has no NaN or infinity: those become null."""
        self._append(METRICS, {"step": step, **metrics})

    def log_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to completions.jsonl; each holds its `step`."""
        for row in rows:
            self._append(COMPLETIONS, row)

    def log_findings(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows to findings.jsonl; each holds its `step`."""
        for row in rows:
            self._append(FINDINGS, row)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("a", encoding="utf-8", errors="backslashreplace")
        file = self._files[name]
        file.write(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: numbers of numpy and torch as Python's, non-finite ones as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def _keep_until(path: Path, step: int) -> None:
    """Drop rows after `step`, and a last line that was cut short, by writing aside and renaming."""
    if not path.exists():
        return
    kept = path.with_name(f".{path.name}.partial")
    with path.open(encoding="utf-8", errors="replace") as source, kept.open("w", encoding="utf-8") as target:
        for line in source:
            row = _row(line)
            if row is not None and row.get("step", 0) <= step and step > 0:
                target.write(line.rstrip("\n") + "\n")
        target.flush()
        os.fsync(target.fileno())
    kept.replace(path)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None
