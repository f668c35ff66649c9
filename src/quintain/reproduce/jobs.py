"""The runs of a reproduction: what each is, and what it reached."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError, nearest
from quintain.reproduce.algorithms import Algorithm, find_algorithm

SAVE_STEPS = 250
FINAL_STEPS = 20
"""Last steps whose mean error is a run's final error. The paper takes the last step alone, and averages seeds only."""

DECIDED_BY_JOB = (
    *("output_dir", "seed", "max_steps", "num_epochs", "prompts_per_step", "num_generations", "shuffle"),
    *("max_completion_length", "min_completion_length", "micro_batch_tokens", "save_steps", "save_total_limit"),
)
"""Settings that an algorithm's name may not carry: they are what the run is, or how it is kept."""


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
        self._refuse_settings(algorithm)
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

    def _refuse_settings(self, algorithm: Algorithm) -> None:
        taken = ("optim", "weight_decay") if self.optimizer == "published" else ()
        for key in algorithm.own_settings:
            if key in DECIDED_BY_JOB:
                raise ConfigError(
                    f"{self.algorithm!r}: {key} is decided by the experiment, and not by an algorithm's name. Leave it "
                    f"out; lengths, seeds, steps and prompts have options of their own."
                )
            if key in taken:
                raise ConfigError(f"{self.algorithm!r}: {key} has no effect with --optimizer published. Leave it out.")


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
