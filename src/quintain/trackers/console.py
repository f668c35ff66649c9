"""The run as it is seen while it trains: a live view on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

KEY_METRICS = {
    "reward": "reward",
    "reward_std": "reward std",
    "kl": "KL",
    "ref_kl": "KL to start",
    "target_kl_gap": "KL to target",
    "entropy": "entropy",
    "clip_fraction": "clipped",
    "loss/value": "value loss",
    "grad_norm": "grad norm",
    "learning_rate": "learning rate",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut off",
    "tokens_per_second": "tokens/s",
}
"""Metric names shown while training, in order, and what they are called there."""

_LINE_METRICS = (
    "reward",
    "kl",
    "ref_kl",
    "target_kl_gap",
    "clip_fraction",
    "loss/value",
    "grad_norm",
    "completions/mean_length",
)
_ZERO_WITHOUT_REUSE = ("kl", "clip_fraction")
"""Exactly 0 in every step of a run that uses each rollout once: then they say nothing and are left out of the line."""
_SAMPLE_CHARACTERS = 300


class ConsoleTracker:
    """Shows progress, the key numbers, and a sample completion.

    Args:
        total_steps: steps of the whole run.
        start_step: steps already done, for a run that is resumed.
        stream: where to write; standard error if None, so that standard output stays free.
        live: a live view (True), plain lines (False), or whichever suits the stream (None).
        sample_every: in plain lines, show a completion at the first step and every so many steps.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        live: bool | None = None,
        sample_every: int = 10,
    ) -> None:
        self.total_steps = total_steps
        self.sample_every = sample_every
        self._stream = sys.stderr if stream is None else stream
        self._started = time.monotonic()
        self._start_step = start_step
        self._metrics: Mapping[str, float] = {}
        self._sample: Text | None = None
        console = Console(file=self._stream)
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal if live is None else live:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step, left="")
            self._live = Live(self._view(), console=console, refresh_per_second=4)
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of one step."""
        self._metrics = metrics
        left = f"{_duration(self._seconds_left(step))} left" if step < self.total_steps else ""
        if self._live is None:
            self._print(f"{summary_line(step, metrics, self.total_steps)}  {left}".rstrip())
            return
        self._progress.update(self._task, completed=step, left=left)
        self._live.update(self._view())

    def log_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the first of the step's completions."""
        if not rows:
            return
        row = rows[0]
        prompt, completion = readable(row.get("prompt", "")), readable(row.get("completion", ""))
        if self._live is not None:
            self._sample = Text.assemble((f"{prompt}\n", "dim"), completion)
            self._live.update(self._view())
        elif (step := int(row.get("step", 0))) == self._start_step + 1 or step % self.sample_every == 0:
            self._print(f"  sample: {prompt} -> {completion}")

    def log_findings(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show what the doctor found at this step, above the live view."""
        for row in rows:
            line = f"  {row['severity']}: {row['message'].rstrip('.')}. {row['advice']}"
            if self._live is None:
                self._print(line)
            else:
                self._live.console.print(Text(line))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _seconds_left(self, step: int) -> float:
        done = max(step - self._start_step, 1)
        return (time.monotonic() - self._started) / done * (self.total_steps - step)

    def _view(self) -> Group:
        numbers = Table.grid(padding=(0, 2))
        shown = [(label, self._metrics[name]) for name, label in KEY_METRICS.items() if name in self._metrics]
        for start in range(0, len(shown), 4):
            cells = [Text(f"{label} {format_number(value)}") for label, value in shown[start : start + 4]]
            numbers.add_row(*cells)
        parts: list[Any] = [self._progress, numbers]
        if self._sample is not None:
            parts.append(Panel(self._sample, title="a completion", title_align="left"))
        return Group(*parts)


def summary_line(step: int, metrics: Mapping[str, float], total_steps: int | None = None) -> str:
    """One line with the step and the key numbers that are there, such as
    `step 3/25  reward 0.412  KL 0.0021  clipped 0.12  grad norm 1.3  length 22.5`."""
    width = len(str(total_steps)) if total_steps else 0
    shown = [name for name in _LINE_METRICS if name in metrics]
    shown = [name for name in shown if metrics[name] != 0 or name not in _ZERO_WITHOUT_REUSE]
    numbers = [f"{KEY_METRICS[name]} {format_number(metrics[name])}" for name in shown]
    return "  ".join([f"step {step:{width}d}" + (f"/{total_steps}" if total_steps else ""), *numbers])


def format_number(value: float | None) -> str:
    """Three significant digits; 'nan' where there is no number."""
    return "nan" if value is None else f"{value:.3g}"


def readable(text: Any) -> str:
    """A prompt or completion on one line: the last message of a chat, no control characters, not too long."""
    if isinstance(text, list):
        text = text[-1].get("content", "") if text else ""
    line = "".join(character if character.isprintable() else " " for character in str(text)).strip()
    return line if len(line) <= _SAMPLE_CHARACTERS else line[: _SAMPLE_CHARACTERS - 3] + "..."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
