"""Which runs a table or figure of the paper is made of, and what of the paper it is set beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quintain.errors import ConfigError, nearest
from quintain.reproduce import paper
from quintain.reproduce.algorithms import ANCHOR, TABLE_3, Algorithm, find_algorithm
from quintain.reproduce.jobs import Job


@dataclass(frozen=True)
class Experiment:
    """One table or figure."""

    title: str
    algorithms: tuple[str, ...]
    lengths: tuple[int, ...]
    axis: str
    """Name in `results.AXES`."""
    paper: paper.Errors
    settings: tuple[dict[str, Any], ...] = ({},)
    """What each group of runs sets beyond the standard run."""


WIDE = {"prompts": 256, "group_size": 32}
"""The regime of the paper's section 4."""

FIGURES: dict[str, Experiment] = {
    "epochs": Experiment(
        "epochs a rollout (section 4.3)",
        ("tpo", "grpo"),
        (8,),
        "epochs",
        paper.FIGURE_EPOCHS,
        tuple({**WIDE, "num_epochs": epochs} for epochs in (1, 2, 4, 8, 16)),
    ),
    "groups": Experiment(
        "completions a prompt (section 4.2)",
        ("tpo", "grpo"),
        (8,),
        "groups",
        paper.FIGURE_GROUPS,
        tuple({"prompts": WIDE["prompts"], "group_size": size} for size in (4, 8, 16, 32, 64)),
    ),
    "anchor": Experiment("anchor and target matching (section 3.7)", ANCHOR, (7, 8, 10), "length", paper.FIGURE_ANCHOR),
}


def table_3(match: str) -> Experiment:
    """Terminal reward, lengths 7 to 10."""
    return Experiment("table 3, terminal reward", TABLE_3, (7, 8, 9, 10), "length", paper.TABLE_3[match])


def plan(
    experiment: Experiment,
    *,
    algorithms: Sequence[str] = (),
    lengths: Sequence[int] = (),
    seeds: int,
    **settings: Any,
) -> list[Job]:
    """Every run of an experiment, seed by seed, so that an early look compares like with like.

    Args:
        algorithms, lengths: instead of the experiment's own.
        seeds: how many; they are 0, 1, ...
        settings: fields of `Job` for every run, which win over the experiment's.
    Raises:
        ConfigError: an algorithm is not known, or the experiment cannot vary it; or there are several lengths in a
            figure that varies something else.
    """
    for name in algorithms:
        _require_fitting(find_algorithm(name), name, experiment)
    if len(lengths) > 1 and experiment.axis != "length":
        raise ConfigError(
            f"--lengths takes one number where {experiment.title} are compared: got {', '.join(map(str, lengths))}."
        )
    return [
        Job(algorithm, length, seed, **{**group, **settings})
        for seed in range(seeds)
        for group in experiment.settings
        for length in lengths or experiment.lengths
        for algorithm in algorithms or experiment.algorithms
    ]


def _require_fitting(algorithm: Algorithm, name: str, experiment: Experiment) -> None:
    """Refuse an algorithm that what the figure varies does not reach: its runs would all be the same."""
    if experiment.axis == "epochs" and "num_epochs" in algorithm.settings:
        raise ConfigError(f"{name} always uses a rollout once, and the figure varies that number. Leave it out.")
    if experiment.axis == "groups" and not algorithm.grouped:
        raise ConfigError(f"{name} samples one completion a prompt, and the figure varies that number. Leave it out.")


def find_figure(name: str) -> Experiment:
    """A figure by name. Raises ConfigError if there is none."""
    if name not in FIGURES:
        known = ["bandit", *FIGURES]
        raise ConfigError(f"--figure knows {', '.join(known)}: got {name!r}.{nearest(name, known)}")
    return FIGURES[name]
