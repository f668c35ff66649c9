"""`quintain selftest`: proof that every algorithm learns on this machine, with no downloads, in about a minute."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quintain.configs.load import CONFIG_CLASSES, find_config_class
from quintain.errors import ConfigError, nearest

EDGE_STEPS = 5
"""Steps averaged at either end of a run."""
REQUIRED_STANDARD_ERRORS = 3.0
REQUIRED_REWARD = 0.6
"""Mean reward that the last steps must reach. Copying the prompt instead of reversing it earns 0.25, guessing 0.06."""

DATASET = "builtin:reversal?length=2&characters=0123"
TASK = {
    "model_init_kwargs": {"characters": "0123>"},
    "max_completion_length": 2,
    "min_completion_length": 2,
    "prompts_per_step": 16,
    "max_steps": 120,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "save_steps": None,
    "log_completions": False,
    "seed": 0,
}
"""Answer "31>" by "13": one reward at the end, and only if all characters are right."""

OWN: dict[str, dict[str, Any]] = {
    "ppo": {"num_generations": 8, "num_epochs": 2, "kl_coef": 0.0, "cliprange_value": 10.0},
    "grpo": {"num_epochs": 2},
    "rloo": {"num_generations": 8, "num_epochs": 2, "beta": 0.0},
    "reinforce": {"num_epochs": 1},
    "dg": {},
    "tpo": {"num_epochs": 2},
}


@dataclass(frozen=True)
class Outcome:
    """How one algorithm did: mean reward of the first and last steps, and the rise in standard errors."""

    algorithm: str
    first: float
    last: float
    standard_errors: float
    seconds: float

    @property
    def learned(self) -> bool:
        return self.standard_errors >= REQUIRED_STANDARD_ERRORS and self.last >= REQUIRED_REWARD


def selftest(algorithms: Sequence[str]) -> int:
    """Train each algorithm on token reversal, print a table, and return 1 if one did not learn."""
    for name in algorithms:
        if name not in CONFIG_CLASSES:
            raise ConfigError(
                f"selftest knows {', '.join(CONFIG_CLASSES)}: got {name!r}.{nearest(name, CONFIG_CLASSES)}"
            )
    console = Console()
    outcomes = []
    for name in algorithms or list(CONFIG_CLASSES):
        with console.status(f"{name} learns to reverse tokens"):
            outcomes.append(run_algorithm(name))
    console.print(_table(outcomes))
    failed = [outcome.algorithm for outcome in outcomes if not outcome.learned]
    if failed:
        console.print(
            f"{', '.join(failed)} did not learn: the last {EDGE_STEPS} steps must reach a mean reward of "
            f"{REQUIRED_REWARD} and exceed the first {EDGE_STEPS} by {REQUIRED_STANDARD_ERRORS:g} standard errors."
        )
    return 1 if failed else 0


def run_algorithm(name: str, **settings: Any) -> Outcome:
    """Train one algorithm on the task and compare its first and last steps."""
    import torch

    from quintain.cli.train import trainer_class
    from quintain.data import load_dataset_reference
    from quintain.rewards import resolve_rewards

    torch.set_num_threads(1)  # on tensors this small, more threads only wait for each other
    started = time.perf_counter()
    rewards, _ = resolve_rewards("exact_match")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        config = find_config_class(name)(output_dir=str(Path(folder) / name), **{**TASK, **OWN[name], **settings})
        trainer = trainer_class(name)(
            model="scratch:tiny",
            reward_funcs=rewards,
            args=config,
            train_dataset=load_dataset_reference(DATASET),
        )
        trainer.train()
    history = [row["reward"] for row in trainer.run.state.log_history]
    first, last = history[:EDGE_STEPS], history[-EDGE_STEPS:]
    return Outcome(name, _mean(first), _mean(last), rise(first, last), time.perf_counter() - started)


def rise(first: Sequence[float], last: Sequence[float]) -> float:
    """Difference of two means in its standard errors; infinite where neither part varies but they differ."""
    gap = _mean(last) - _mean(first)
    error = math.sqrt(_variance(first) / len(first) + _variance(last) / len(last))
    return gap / error if error > 0 else math.copysign(math.inf, gap) if gap else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("algorithm", "first reward", "last reward", "rise (standard errors)", "seconds", "learned")
    for outcome in outcomes:
        table.add_row(
            outcome.algorithm,
            f"{outcome.first:.3f}",
            f"{outcome.last:.3f}",
            f"{outcome.standard_errors:.1f}",
            f"{outcome.seconds:.1f}",
            "yes" if outcome.learned else "NO",
        )
    return table
