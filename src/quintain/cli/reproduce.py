"""`quintain reproduce tpo-paper`: the paper's tables and figures on this package's trainers, ours beside theirs."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quintain.errors import ConfigError

PAPERS = ("tpo-paper",)
STANDARD = {"match": "prompts", "optimizer": "package"}
"""How table 3 is made unless the options say otherwise."""
DEFAULT_SEEDS, DEFAULT_EPISODES, BANDIT_SEEDS = 3, 2000, 100

Item = TypeVar("Item")


def add_reproduce_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's options."""
    parser = commands.add_parser(
        "reproduce",
        help="a paper's tables and figures, ours beside theirs",
        description="Run the experiments of Target Policy Optimization (arXiv:2604.06159) on this package's trainers, "
        "and set the errors beside the paper's. Started again with the same options, the command skips runs that are "
        "finished and goes on with those that were stopped. results.json, table.md and errors.png in the folder hold "
        "the runs of the last command.",
        allow_abbrev=False,
    )
    parser.add_argument("paper", choices=PAPERS)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--table", choices=["3"], help="terminal reward at lengths 7 to 10")
    what.add_argument("--figure", metavar="NAME", help="epochs, groups, anchor, or bandit (half a minute)")
    parser.add_argument("--lengths", type=_numbers, default=[], metavar="H,H", help="token lengths, such as 7,10")
    parser.add_argument(
        "--algorithms",
        type=_names,
        default=[],
        metavar="A,A",
        help="such as tpo,grpo; with settings of their own as in tpo+group_logits=logratio",
    )
    parser.add_argument(
        "--seeds", type=_positive, metavar="N", help="runs of each kind, from seed 0; default 3, or 100 bandits"
    )
    parser.add_argument("--episodes", type=_positive, metavar="N", help="training steps of a run; default 2000")
    parser.add_argument(
        "--match",
        choices=["prompts", "interactions"],
        default=STANDARD["match"],
        help="give algorithms with one completion a prompt as many prompts as the others (the default), or as many "
        "completions, at a learning rate that grows with the root of their number",
    )
    parser.add_argument("--prompts", type=_positive, metavar="N", help="prompts a step, instead of the paper's")
    parser.add_argument(
        "--reward_noise", type=_noise, metavar="S", help="add noise of this standard deviation to every reward"
    )
    parser.add_argument(
        "--optimizer",
        choices=["package", "published"],
        default=STANDARD["optimizer"],
        help="Muon as `optim: muon` applies it (the default), or to the tensors that the paper's code gives it",
    )
    parser.add_argument("--jobs", type=_positive, metavar="N", help="runs at a time, one thread each; default 1")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="default: runs/tpo-paper/ and what is made")
    parser.set_defaults(run=reproduce)


def reproduce(options: argparse.Namespace) -> int:
    """Make the runs, write their results, and print them."""
    if options.figure == "bandit":
        return _bandit(options)
    from quintain.reproduce.plan import find_figure, plan, table_3

    experiment = table_3(options.match) if options.table else find_figure(options.figure)
    if len(set(options.algorithms)) < len(options.algorithms) or len(set(options.lengths)) < len(options.lengths):
        raise ConfigError("--algorithms and --lengths must name each one once.")
    jobs = plan(
        experiment,
        algorithms=options.algorithms,
        lengths=options.lengths,
        seeds=options.seeds or DEFAULT_SEEDS,
        episodes=options.episodes or DEFAULT_EPISODES,
        match=options.match,
        optimizer=options.optimizer,
        **{name: value for name in ("prompts", "reward_noise") if (value := getattr(options, name))},
    )
    from quintain.reproduce.results import AXES, write_results
    from quintain.reproduce.runs import run_jobs

    folder = _folder(options)
    results, failed = run_jobs(jobs, folder, at_once=options.jobs or 1)
    if results:
        # A figure's numbers in the paper are for its own length and prompts.
        same = experiment.axis == "length" or not (options.lengths or options.prompts)
        paper = experiment.paper if same else {}
        text = write_results(results, folder, axis=AXES[experiment.axis], paper=paper, command=_command(options))
        print(f"{experiment.title}\n\n{text}\n\nresults.json, table.md and errors.png are in {folder}.")
    for line in failed:
        print(f"quintain: not finished: {line}", file=sys.stderr)
    return 1 if failed else 0


def _bandit(options: argparse.Namespace) -> int:
    """Exact bandits, which need no network and no runs."""
    from quintain.reproduce.bandit_figure import run_bandits

    given = [
        name
        for name in ("lengths", "algorithms", "episodes", "prompts", "reward_noise", "jobs")
        if getattr(options, name)
    ]
    given += [name for name, default in STANDARD.items() if getattr(options, name) != default]
    if given:
        named = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"--figure bandit takes --seeds and --output_dir only: got {named}. Leave it out.")
    folder = _folder(options)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output_dir must be a folder: got {folder}, which is a file.")
    print(run_bandits(folder, seeds=options.seeds or BANDIT_SEEDS))
    print(f"\nbandit.json and bandit.png are in {folder}.")
    return 0


def _folder(options: argparse.Namespace) -> Path:
    made = f"table-{options.table}" if options.table else f"figure-{options.figure}"
    special = [getattr(options, name) for name, default in STANDARD.items() if getattr(options, name) != default]
    folder: Path = options.output_dir or Path("runs") / options.paper / "-".join([made, *special])
    return folder


def _command(options: argparse.Namespace) -> str:
    """The command line that makes these results, with what is not as by default."""
    words = ["quintain", "reproduce", options.paper]
    words += ["--table", options.table] if options.table else ["--figure", options.figure]
    for name in ("lengths", "algorithms", "seeds", "episodes", "prompts", "reward_noise"):
        value = getattr(options, name)
        if value:
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    for name, default in STANDARD.items():
        if getattr(options, name) != default:
            words += [f"--{name}", getattr(options, name)]
    return shlex.join(words)


def _list_of(read: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    def read_all(text: str) -> list[Item]:
        return [read(part.strip()) for part in text.split(",")]

    return read_all


def _positive(text: str) -> int:
    """A whole number above 0; argparse makes an error message of the exception."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0: got {text!r}")
    return int(text)


def _noise(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more: got {text!r}")
    return value


_numbers = _list_of(_positive)
_names = _list_of(str)
