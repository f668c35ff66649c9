"""Where the time of one training step goes: `quintain train --profile`, or `profile_step(trainer)` before training."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from quintain.monitor.statistics import StepStatistics
from quintain.trainers.run import peak_memory_gb

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer

OPERATORS = 30
"""Rows of operators.txt."""


def profile_step(trainer: OnlineRLTrainer) -> None:
    """Trace the second step that `trainer.train()` will make, or the first one if it makes no more than that.

    Written to `profile` in the run's folder by the first process:

    - phases.json: `step`, `seconds`, `tokens` (completion tokens sampled), `memory_peak_gb` (GiB, since the process
      began) and `phases`: for each, `seconds` and `share` of the step.
    - trace.json: every operator, for chrome://tracing or ui.perfetto.dev.
    - operators.txt: the operators that took most time by themselves.

    The step computes what it would compute otherwise. Tracing makes it slower, by a few microseconds an operator.
    """
    if trainer.run.is_main:
        _Profile(trainer).attach()


class _Profile:
    """Stands before a trainer's `run_step` until one step is traced.

    Methods are replaced on the instances, for the length of that step, by ones that call them and read the clock.
    """

    def __init__(self, trainer: OnlineRLTrainer) -> None:
        self.trainer = trainer
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False
        self._calls = 0

    @property
    def phases(self) -> list[tuple[str, Any, str]]:
        """Each phase, with the object and the method that it is spent in. The rest of a step is bookkeeping."""
        trainer = self.trainer
        return [
            ("rollout", trainer, "generate_rollouts"),
            ("reward", trainer, "score"),
            ("annotate", trainer.policies, "annotate"),
            ("estimate", trainer, "estimate"),
            ("forward", trainer.policies, "online"),
            ("forward", trainer, "loss"),
            ("backward", trainer.accelerator, "backward"),
            ("optimizer", trainer.optimizer, "step"),
            ("optimizer", trainer, "maybe_update_target"),
        ]

    def attach(self) -> None:
        self.trainer.run_step = self.run_step  # type: ignore[method-assign]

    def run_step(self) -> StepStatistics:
        """The trainer's own `run_step`, traced when its turn has come."""
        self._calls += 1
        run_step = partial(type(self.trainer).run_step, self.trainer)
        if self._calls == 1 and self.trainer.run.step + 1 < self.trainer.max_steps:
            return run_step()
        del self.trainer.run_step  # what is below is the class's again
        return self.trace(run_step)

    def trace(self, run_step: Callable[[], StepStatistics]) -> StepStatistics:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as trace, self._clocks():
            start = _now()
            statistics = run_step()
            seconds = _now() - start
        self.write(trace, statistics, seconds)
        return statistics

    @contextmanager
    def _clocks(self) -> Iterator[None]:
        own = [(owner, name, vars(owner).get(name)) for _, owner, name in self.phases]
        for phase, owner, name in self.phases:
            setattr(owner, name, partial(self._timed, phase, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, method in own:  # where an instance had one of its own, that comes back
                delattr(owner, name) if method is None else setattr(owner, name, method)

    def _timed(self, phase: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call the method. What one phase calls of another is the outer one's time."""
        if self._inside:
            return method(*arguments, **named)
        self._inside = True
        start = _now()
        try:
            with record_function(phase):
                return method(*arguments, **named)
        finally:
            self.seconds[phase] += _now() - start
            self._inside = False

    def write(self, trace: profile, statistics: StepStatistics, seconds: float) -> None:
        folder = self.trainer.run.folder / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        assert statistics.rollouts is not None
        names = dict.fromkeys(phase for phase, _, _ in self.phases)
        phases = {name: self.seconds[name] for name in names}
        phases["rest"] = seconds - sum(phases.values())
        report = {
            "step": self.trainer.run.step + 1,
            "seconds": seconds,
            "tokens": int(statistics.rollouts.completion_mask.sum()),
            "memory_peak_gb": peak_memory_gb(),
            "phases": {name: {"seconds": value, "share": value / seconds} for name, value in phases.items()},
        }
        (folder / "phases.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        trace.export_chrome_trace(str(folder / "trace.json"))
        own_time = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=own_time, row_limit=OPERATORS)
        (folder / "operators.txt").write_text(table + "\n", encoding="utf-8")
        print(phase_table(report, folder), file=sys.stderr)


def phase_table(report: dict[str, Any], folder: Path) -> str:
    """What phases.json says, in lines for the console."""
    lines = [
        f"  {name:10s} {phase['seconds']:9.3f} s {phase['share']:6.1%}" for name, phase in report["phases"].items()
    ]
    return "\n".join(
        [
            f"Profile of step {report['step']}: {report['seconds']:.3f} s, {report['tokens']} completion tokens, "
            f"peak memory {report['memory_peak_gb']:.2f} GiB",
            *lines,
            f"  more in {folder}: phases.json, trace.json (ui.perfetto.dev), operators.txt",
        ]
    )


def _now() -> float:
    """Seconds, once the GPU has done what was asked of it so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
