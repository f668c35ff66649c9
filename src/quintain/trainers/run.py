"""What surrounds the loop: the run's folder, numbers going out, evaluation, checkpoints, interruption. Nothing in here
reaches into a step."""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quintain.checkpoints.state import Stateful
from quintain.checkpoints.store import latest_checkpoint, load_checkpoint, save_checkpoint
from quintain.configs.runfolder import set_aside_run, write_config
from quintain.errors import ConfigError, RolloutError
from quintain.monitor.health import Doctor
from quintain.monitor.statistics import StepStatistics
from quintain.report.render import write_report
from quintain.trackers import ConsoleTracker, JsonlTracker
from quintain.trainers.callbacks import Callbacks
from quintain.trainers.evaluation import evaluate
from quintain.trainers.export import save_models

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer

MAX_NONFINITE_STEPS = 3
"""Optimizer steps in a row without a finite gradient after which a run stops."""

_log = logging.getLogger(__name__)


class Counter:
    """How far the run is, and how many tokens its micro-batches hold: another number would round differently."""

    def __init__(self, micro_batch_tokens: int) -> None:
        self.micro_batch_tokens = micro_batch_tokens
        self.step = 0
        self.best: float | None = None
        self.best_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Run:
    """One run of a trainer, from its folder's first file to its report."""

    def __init__(self, trainer: OnlineRLTrainer, callbacks: Sequence[Any]) -> None:
        self.trainer, self.config = trainer, trainer.config
        self.folder = Path(self.config.output_dir)
        self.counter = Counter(trainer.policies.micro_batch_tokens)
        self.callbacks = Callbacks(callbacks, self.config, trainer.max_steps)
        self.doctor = Doctor(self.config.to_dict())
        self.settings: dict[str, Any] = {"algorithm": type(trainer).__name__, **self.config.to_dict()}
        """What goes into config.yaml; the command replaces it by the whole recipe."""
        self.stopping = self.interrupted = False
        self._nonfinite = 0
        self._saved_at = -1
        self._begun = False
        self._trackers: list[Any] = []
        self._step_started = 0.0

    @property
    def step(self) -> int:
        """Training steps finished."""
        return self.counter.step

    @property
    def state(self) -> Any:
        """What callbacks and reward functions see of the run: a `transformers.TrainerState`."""
        return self.callbacks.state

    @property
    def parts(self) -> dict[str, Stateful]:
        """Everything that decides the run's future, by the name it has in a checkpoint."""
        trainer = self.trainer
        parts: dict[str, Any] = {
            "policies": trainer.policies,
            "optimizer": trainer.optimizer,
            "target_update": trainer.policies.target_update,
            "kl_controller": trainer.kl_controller,
            "prompts": trainer.prompts,
            "generators": trainer.generators,
            "doctor": self.doctor,
            "counter": self.counter,
            **trainer.parts,
        }
        return {name: part for name, part in parts.items() if part is not None}

    # ---- around the loop ----------------------------------------------------------------------------------------

    @contextmanager
    def session(self, resume_from: str | Path | None = None) -> Iterator[None]:
        """Open the run's folder and trackers, restore a checkpoint if asked to, and on leaving save what was learnt.

        The first Ctrl-C ends the run after the step in progress, with a checkpoint; a second one ends it at once.
        """
        self._require_data()
        self.stopping = self.interrupted = False
        checkpoint = _find_checkpoint(resume_from)
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.parts)
            self._restore_micro_batches()
            self.trainer.first_update.untrained = False
            _log.info("resumed from %s", checkpoint)
            if self.step >= self.trainer.max_steps and self.is_main:
                print(
                    f"note: this run has finished already ({self.step} of {self.trainer.max_steps} steps); raise "
                    f"max_steps to go on.",
                    file=sys.stderr,
                )
        if self.is_main:
            fresh = checkpoint is None and not self._begun
            if fresh and (earlier := set_aside_run(self.folder)) is not None:
                print(
                    f"note: the run that was in {self.folder} is now in {earlier}. To go on with it instead: quintain "
                    f"train --resume {earlier}",
                    file=sys.stderr,
                )
            write_config(self.folder, {**self.settings, **self._chosen()})
        self._begun = True
        self._open_trackers()
        self.callbacks.begin(self.step)
        self._step_started = time.perf_counter()
        try:
            with self._ctrl_c():
                yield
            self._finish()
        finally:
            self._close_trackers()

    def finish_step(self, statistics: StepStatistics) -> None:
        """Count the step, and tell everyone who wants to know."""
        self.counter.step += 1
        row = {"step": self.step, **statistics.result(), **self._timing(statistics)}
        self.trainer.optimizer.next_rate()
        if self.config.eval_steps and self.step % self.config.eval_steps == 0:
            scores = evaluate(self.trainer)
            row.update(scores)
            self.callbacks.evaluated(scores)
        findings = self.doctor.observe(row)
        self.callbacks.step_end(self.step, row)
        if self.is_main:
            self._write(row, statistics, findings)
        self._watch_for_nonfinite(row)
        stop = any(finding.action == "stop" for finding in findings) or self.callbacks.control.should_training_stop
        self.stopping = self._any_process(self.stopping or stop)
        reasons = (
            self._is_best(row),
            self.config.save_steps is not None and self.step % self.config.save_steps == 0,
            any(finding.action == "checkpoint" for finding in findings),
            self.callbacks.control.should_save,
        )
        if self._any_process(any(reasons)):
            self.save_checkpoint()
        self._step_started = time.perf_counter()

    def save_checkpoint(self) -> Path:
        """Write a checkpoint of this moment, unless this step already has one, and return its folder."""
        path = self.folder / "checkpoints" / f"step-{self.step:06d}"
        if self._saved_at != self.step and self.is_main:
            path = save_checkpoint(
                self.folder / "checkpoints",
                self.step,
                self.parts,
                keep=self.config.save_total_limit,
                protect=self.counter.best_step,
            )
            self.callbacks.saved(self.step)
        self._saved_at = self.step
        self.trainer.accelerator.wait_for_everyone()
        return path

    # ---- inside -------------------------------------------------------------------------------------------------

    def _restore_micro_batches(self) -> None:
        """Where no setting says their size, it stays what the checkpoint's run chose."""
        policies = self.trainer.policies
        chosen = not isinstance(self.config.micro_batch_tokens, int)
        if chosen and policies.micro_batch_tokens != self.counter.micro_batch_tokens:
            policies.micro_batch_tokens = self.counter.micro_batch_tokens
            _log.warning("note: micro_batch_tokens stays %d, as in the run that is resumed.", *self._chosen().values())
        self.counter.micro_batch_tokens = policies.micro_batch_tokens

    def _chosen(self) -> dict[str, Any]:
        """What settings that leave a choice stand for in this run, so that config.yaml can repeat it."""
        if isinstance(self.config.micro_batch_tokens, int):
            return {}
        policies = self.trainer.policies
        return {"micro_batch_tokens": policies.micro_batch_tokens * policies.module.backbone_passes}

    def _any_process(self, flag: bool) -> bool:
        """Whether any process says so: all must stop, and save, at the same step."""
        return self.trainer.sum_over_processes(int(flag)) > 0

    @property
    def is_main(self) -> bool:
        return bool(self.trainer.accelerator.is_main_process)

    def _require_data(self) -> None:
        for name, part in (("train_dataset", self.trainer.prompts), ("reward_funcs", self.trainer.reward)):
            if part is None:
                raise ConfigError(
                    f"train() needs {name}, which was not given. Pass {name} to the trainer, or drive it yourself with "
                    f"step(queries, responses, scores)."
                )

    def _timing(self, statistics: StepStatistics) -> dict[str, float]:
        seconds = time.perf_counter() - self._step_started
        tokens = int(statistics.rollouts.completion_mask.sum()) if statistics.rollouts is not None else 0
        return {
            "time/step": seconds,
            "tokens_per_second": tokens * self.trainer.accelerator.num_processes / max(seconds, 1e-9),
            "memory_peak_gb": peak_memory_gb(),
        }

    def _is_best(self, row: dict[str, float]) -> bool:
        """Whether `metric_for_best_model` has never been higher than in this row."""
        value = row.get(self.config.metric_for_best_model or "")
        if value is None or (self.counter.best is not None and value <= self.counter.best):
            return False
        self.counter.best, self.counter.best_step = float(value), self.step
        self.state.best_metric = self.counter.best
        return True

    def _watch_for_nonfinite(self, row: dict[str, float]) -> None:
        self._nonfinite = 0 if math.isfinite(row.get("grad_norm", 0.0)) else self._nonfinite + 1
        if self._nonfinite >= MAX_NONFINITE_STEPS:
            raise RolloutError(
                f"the gradient was not finite in {self._nonfinite} steps in a row (step {self.step}); updates "
                f"with such a gradient were left out. Lower learning_rate, or look for extreme rewards in "
                f"{self.folder / 'metrics.jsonl'}."
            )

    def _write(self, row: dict[str, float], statistics: StepStatistics, findings: Sequence[Any]) -> None:
        completions = completion_rows(self.step, statistics) if self.config.log_completions else []
        shown = self.step % self.config.logging_steps == 0 or self.step in (1, self.trainer.max_steps)
        for tracker in self._trackers:
            if shown or isinstance(tracker, JsonlTracker):
                tracker.log(self.step, row)
                tracker.log_completions(completions)
            tracker.log_findings([asdict(finding) for finding in findings])
        if self.config.report_to and shown:
            self.trainer.accelerator.log(row, step=self.step)

    def _open_trackers(self) -> None:
        if not self.is_main:
            return
        self._trackers = [
            JsonlTracker(self.folder, start_step=self.step),
            ConsoleTracker(self.trainer.max_steps, start_step=self.step),
        ]
        if self.config.report_to:
            name = self.config.run_name or self.folder.name
            plain = {key: value for key, value in self.config.to_dict().items() if isinstance(value, int | float | str)}
            self.trainer.accelerator.init_trackers(name, config=plain)

    def _close_trackers(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self.config.report_to:
            self.trainer.accelerator.end_training()

    def _finish(self) -> None:
        unfinished = self.step < self.trainer.max_steps
        if unfinished or self.config.save_steps:
            checkpoint = self.save_checkpoint()
        if self.is_main and not self.interrupted:
            save_models(self.trainer, self.folder)
        self._close_trackers()
        if self.is_main:
            write_report([self.folder])  # after the trackers have written their last line
            if unfinished:
                print(
                    f"Stopped after step {self.step} of {self.trainer.max_steps}; checkpoint in {checkpoint}.\n"
                    f"Go on with: quintain train --resume {self.folder}",
                    file=sys.stderr,
                )
        self.callbacks.end(self.step)

    @contextmanager
    def _ctrl_c(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop_after_step(_signal: int, _frame: Any) -> None:
            signal.signal(signal.SIGINT, previous)
            self.stopping = self.interrupted = True
            print("\nStopping after this step, with a checkpoint. Ctrl-C again stops at once.", file=sys.stderr)

        previous = signal.signal(signal.SIGINT, stop_after_step)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def completion_rows(step: int, statistics: StepStatistics) -> list[dict[str, Any]]:
    """One row a completion: step, prompt, completion, every reward, and its advantage or target weight."""
    rollouts = statistics.rollouts
    if rollouts is None or rollouts.rewards is None:
        return []
    rollouts, output = rollouts.to("cpu"), rollouts.reward_output
    rows = []
    for index, (prompt, completion) in enumerate(zip(rollouts.prompts, rollouts.completions)):
        row: dict[str, Any] = {
            "step": step,
            "prompt": prompt,
            "completion": completion,
            "reward": float(rollouts.rewards[index]) if bool(rollouts.scored[index]) else None,  # type: ignore[index]
            "rewards": {name: _number(values[index]) for name, values in output.components.items()} if output else {},
            "length": int(rollouts.lengths[index]),
            "stopped": bool(rollouts.stopped[index]),
        }
        if rollouts.target_weights is not None:
            row["target_weight"] = float(rollouts.target_weights[index])
        if rollouts.advantages is not None:
            mask = rollouts.completion_mask[index]
            row["advantage"] = float(rollouts.advantages[index][mask].mean()) if bool(mask.any()) else 0.0
        row.update({name: values[index] for name, values in output.extra.items()} if output else {})
        rows.append(row)
    return rows


def _number(value: Any) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number


def _find_checkpoint(resume_from: str | Path | None) -> Path | None:
    if resume_from is None:
        return None
    path = Path(resume_from)
    return path if (path / "manifest.json").exists() else latest_checkpoint(path)


def peak_memory_gb() -> float:
    """Peak memory of this process so far, in GiB: of the GPU where there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
