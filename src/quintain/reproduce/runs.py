"""Making the runs of a reproduction, several at a time, and going on where they were stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from filelock import FileLock, Timeout
from rich.progress import Progress

from quintain.errors import ConfigError, DataError
from quintain.reproduce.algorithms import find_algorithm
from quintain.reproduce.jobs import Job, Result


def run_jobs(jobs: Sequence[Job], folder: Path, *, at_once: int) -> tuple[list[Result], list[str]]:
    """Make the runs that are missing.

    A run in progress leaves checkpoints, and a finished one `result.json`, in a folder of its own under `runs`. A run
    that fails does not keep the others from being made.

    Returns:
        What all runs reached, in order, and a line about each one that failed.
    Raises:
        ConfigError: a job's settings cannot work, or `folder` is no folder; before any run begins.
    """
    for job in jobs:
        job.config(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output_dir must be a folder that can be written to: got {folder} ({error}).") from error
    todo = [job for job in jobs if finished(job, folder) is None]
    print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already.", file=sys.stderr)
    failed = _make(todo, folder, at_once) if todo else []
    return [result for job in jobs if (result := finished(job, folder)) is not None], failed


def _make(jobs: Sequence[Job], folder: Path, at_once: int) -> list[str]:
    """Make the runs; returns a line about each that failed."""
    failed: list[str] = []
    queue = list(jobs)
    # A process of its own for each run at a time: torch's threads and its random state are a process's.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(at_once, mp_context=context, initializer=_end_with, initargs=(os.getpid(),)) as pool,
        Progress(transient=True) as progress,
    ):
        bar = progress.add_task("runs", total=len(jobs))
        running: dict[Future[Result], Job] = {}
        while queue or running:
            # No more than run at once, so that an interruption finds none waiting that would still be begun.
            while queue and len(running) < at_once:
                job = queue.pop(0)
                running[pool.submit(run, job, folder)] = job
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                progress.advance(bar)
                try:
                    made = future.result()
                except BrokenProcessPool:
                    return [
                        *failed,
                        f"{job.name}: its process was killed, perhaps for want of memory. Use fewer --jobs.",
                    ]
                except Exception as error:
                    failed.append(f"{job.name}: {error} See {_place(job, folder) / 'log.txt'}.")
                    continue
                told = f"{job.name}: final error {100 * made.final_error:.1f}%, {made.seconds:.0f} s"
                progress.console.print(told, highlight=False)
    return failed


def _end_with(parent: int) -> None:
    """Make this process end when its parent has; a run that is cut short goes on from its checkpoint."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(job: Job, folder: Path) -> Result:
    """Make one run, or go on with it, in this process; what it prints goes to `log.txt` in its folder.

    Raises:
        ConfigError: another process is making this very run.
        DataError: its metrics are not those of a whole run.
    """
    import torch

    torch.set_num_threads(1)  # on tensors this small, more threads only wait for each other
    place = _place(job, folder)
    place.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(place / "lock", timeout=0):
            with (place / "log.txt").open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
                _train(job, place)
            result = _read(job, place)
            whole = place / "result.json.part"
            whole.write_text(json.dumps(result.to_dict()), encoding="utf-8")
            os.replace(whole, place / "result.json")
    except Timeout as error:
        raise ConfigError(f"another command is making the run in {place}. Wait for it to end.") from error
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
    """What the run's metrics say; they must hold every step once."""
    from quintain.monitor.runs import read_metrics

    rows = read_metrics(place).rows
    if [row["step"] for row in rows] != list(range(1, job.episodes + 1)):
        raise DataError(
            f"{place / 'metrics.jsonl'} has {len(rows)} steps where the run has {job.episodes}. Delete the folder "
            f"{place} to make the run again."
        )
    errors = [1 - float(row.get("exact", row["reward"])) for row in rows]
    statistics = {}
    for name in ("group/effective_size", "frac_reward_zero_std", "entropy", "kl", "time/step"):
        values = [float(row[name]) for row in rows if row.get(name) is not None]
        if values:
            statistics[f"{name}, first 100 steps"] = sum(values[:100]) / len(values[:100])
            statistics[name] = sum(values) / len(values)
    return Result(job, errors, statistics, sum(float(row["time/step"]) for row in rows))


def finished(job: Job, folder: Path) -> Result | None:
    """The result of a run that was made with these very settings; a file that cannot be read is none."""
    try:
        result = Result.from_dict(json.loads((_place(job, folder) / "result.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if result.job == job else None


def _place(job: Job, folder: Path) -> Path:
    return folder / "runs" / job.name
