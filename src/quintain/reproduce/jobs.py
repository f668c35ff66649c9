"""The runs of a reproduction: what each is, making them several at a time, and going on where they were stopped."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.progress import Progress

from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError, nearest
from quintain.reproduce.algorithms import find_algorithm

SAVE_STEPS = 250
FINAL_STEPS = 20
"""Last steps whose mean error is a run's final error."""


@dataclass(frozen=True)
class Job:
    """One run: an algorithm on sequences of one length, from one seed."""

    algorithm: str
    length: int
    seed: int
    episodes: int = 2000
    """Training steps."""
    num_epochs: int = 4
    prompts: int = 100
    """Prompts a step, for algorithms that compare several completions of each."""
    group_size: int = 8
    match: str = "prompts"
    """Whether algorithms with one completion a prompt get as many "prompts" a step, or as many completions
    ("interactions") at a learning rate that grows with the root of their number."""
    reward_noise: float = 0.0
    """Standard deviation of noise added to every reward."""
    optimizer: str = "package"
    """Whether Muon is applied as `optim: muon` does ("package"), or as the paper's code does ("published")."""

    @property
    def name(self) -> str:
        """Of the run's folder: what distinguishes it from the standard run of its algorithm and length."""
        standard = Job(self.algorithm, self.length, self.seed)
        other = {key: value for key, value in asdict(self).items() if value != getattr(standard, key)}
        return "-".join(
            [self.algorithm, f"H{self.length}", *(f"{key}={value}" for key, value in other.items()), f"seed{self.seed}"]
        )

    def config(self, folder: Path) -> OnlineRLConfig:
        """The trainer's settings.

        Raises:
            ConfigError: a setting in the algorithm's name is unknown or outside its range.
        """
        algorithm = find_algorithm(self.algorithm)
        trainer = algorithm.load()
        times = 1 if algorithm.grouped or self.match == "prompts" else self.group_size
        settings = {
            "output_dir": str(folder),
            "seed": self.seed,
            "max_steps": self.episodes,
            "num_epochs": self.num_epochs,
            "prompts_per_step": self.prompts * times,
            "num_generations": self.group_size if algorithm.grouped else 1,
            "optim": "muon",
            "learning_rate": 1e-3 * math.sqrt(times),
            "lr_scheduler_type": "constant",
            "max_grad_norm": None,
            "max_completion_length": self.length,
            "min_completion_length": self.length,
            "micro_batch_tokens": 10**6,
            "shuffle": False,
            "save_steps": SAVE_STEPS,
            "save_total_limit": 1,
            "logging_steps": 100,
            "log_completions": False,
            **algorithm.settings,
        }
        known = [item.name for item in fields(trainer.config_class) if item.init]
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"{self.algorithm!r}: {key!r} is not a setting of {trainer.config_class.__name__}."
                    f"{nearest(key, known)}"
                )
        return trainer.config_class(**settings)


@dataclass(frozen=True)
class Result:
    """What a run reached."""

    job: Job
    errors: list[float]
    """1 - mean reward of each step's completions: the share of them with any wrong token."""
    statistics: dict[str, float]
    """Means over the first 100 steps and over all, of a few other metrics."""
    seconds: float
    """Of all steps together."""

    @property
    def final_error(self) -> float:
        last = self.errors[-FINAL_STEPS:]
        return sum(last) / len(last)

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data, in the form of results.json."""
        return {
            **asdict(self.job),
            "final_error": round(self.final_error, 6),
            "seconds": round(self.seconds, 1),
            "statistics": {name: round(value, 4) for name, value in self.statistics.items()},
            "errors": [round(error, 5) for error in self.errors],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        job = Job(**{item.name: data[item.name] for item in fields(Job) if item.name in data})
        return cls(job, data["errors"], data["statistics"], data["seconds"])


def run_jobs(jobs: Sequence[Job], folder: Path, *, at_once: int) -> list[Result]:
    """Make the runs that are missing, and return all of them in order.

    A run in progress leaves checkpoints, and a finished one `result.json`, in a folder of its own under `runs`.

    Raises:
        ConfigError: a job's settings cannot work; before any run begins.
    """
    for job in jobs:
        job.config(folder)
    todo = [job for job in jobs if _finished(job, folder) is None]
    print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already.", file=sys.stderr)
    # A process of its own for each run at a time: torch's threads and its random state are a process's.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, mp_context=context) as pool, Progress(transient=True) as progress:
        bar = progress.add_task("runs", total=len(todo))
        waiting = [pool.submit(run, job, folder) for job in todo]
        try:
            for future in as_completed(waiting):
                made = future.result()
                progress.advance(bar)
                progress.console.print(
                    f"{made.job.name}: final error {100 * made.final_error:.1f}%, {made.seconds:.0f} s",
                    highlight=False,
                )
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
    return [result for job in jobs if (result := _finished(job, folder)) is not None]


def run(job: Job, folder: Path) -> Result:
    """Make one run, or go on with it, in this process; what it prints goes to `log.txt` in its folder."""
    import torch

    torch.set_num_threads(1)  # on tensors this small, more threads only wait for each other
    place = _place(job, folder)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "log.txt").open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        _train(job, place)
    result = _read(job, place)
    whole = place / "result.json.part"
    whole.write_text(json.dumps(result.to_dict()), encoding="utf-8")
    os.replace(whole, place / "result.json")
    return result


def _train(job: Job, place: Path) -> None:
    from quintain.checkpoints.store import list_checkpoints
    from quintain.reproduce import task
    from quintain.reproduce.published_muon import PublishedMuon

    config = job.config(place)
    network = task.reversal_network(job.length, job.seed)
    own = PublishedMuon(network, config.learning_rate) if job.optimizer == "published" else None
    trainer = find_algorithm(job.algorithm).load()(
        model=network,
        processing_class=task.reversal_tokenizer(),
        reward_funcs=task.NoisyReversal(job.reward_noise, job.seed) if job.reward_noise else task.exact_reversal,
        args=config,
        train_dataset=task.reversal_prompts(job.length, config.prompts_per_step * job.episodes, job.seed),
        optimizers=(own, None),
    )
    trainer.train(resume_from=place if list_checkpoints(place / "checkpoints") else None)
    if trainer.run.interrupted:
        raise KeyboardInterrupt


def _read(job: Job, place: Path) -> Result:
    from quintain.monitor.runs import read_metrics

    rows = read_metrics(place).rows
    errors = [1 - float(row["reward"]) for row in rows]
    statistics = {}
    for name in ("group/effective_size", "frac_reward_zero_std", "entropy", "kl", "time/step"):
        values = [float(row[name]) for row in rows if row.get(name) is not None]
        if values:
            statistics[f"{name}, first 100 steps"] = sum(values[:100]) / len(values[:100])
            statistics[name] = sum(values) / len(values)
    return Result(job, errors, statistics, sum(float(row["time/step"]) for row in rows))


def _finished(job: Job, folder: Path) -> Result | None:
    """The result of a run that was made with these very settings."""
    path = _place(job, folder) / "result.json"
    if not path.is_file():
        return None
    result = Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
    return result if result.job == job else None


def _place(job: Job, folder: Path) -> Path:
    return folder / "runs" / job.name
