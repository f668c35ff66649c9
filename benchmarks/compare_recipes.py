"""Recipes against each other: the same budget of completions, several seeds, one table of what they reached.

    python benchmarks/compare_recipes.py quickstart-ppo quickstart-grpo --max_steps 20 --seeds 0,1,2 --jobs 2

Recipes come first. An option that is not in the list below is a field of the recipes and goes to every run, as in
`quintain train RECIPE --field value`. Run RECIPE with seed S lies in OUTPUT_DIR/RECIPE/seed-S, and what it printed in
seed-S.log beside that. Started again, the command skips runs that are finished and continues the others from their
last checkpoint, or from the start where they have none. OUTPUT_DIR then holds

    table.md          rewards for each seed, their mean with a 95% interval of Student's t, differences paired by seed
    results.json      the same numbers
    reward.png        reward against completions sampled
    eval_reward.png   held-out reward against completions sampled, and against seconds, where the recipes evaluate
    comparison.html   all other curves, as `quintain report` draws them
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations, pairwise, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from measuring import positive

from quintain.checkpoints.store import list_checkpoints
from quintain.configs.load import Recipe, load_recipe, parse_arguments, read_recipe, recipe_from_dict
from quintain.errors import ConfigError, QuintainError
from quintain.monitor.runs import read_metrics
from quintain.report.intervals import t_interval
from quintain.report.markdown import table_header, table_row
from quintain.report.plots import smooth
from quintain.report.render import write_report

REWARDS = {
    "reward_first": "reward, first {n}",
    "reward_last": "reward, last {n}",
    "reward_mean": "reward, all steps",
}
EVALUATION = {
    "eval_reward_last": "held-out reward, last two",
    "eval_reward_best": "held-out reward, best",
}
SPREAD = {"reward_spread": "reward, step to step"}
CRITIC = {
    "value_loss_first": "value loss, first {n}",
    "value_loss_last": "value loss, last {n}",
    "explained_variance_first": "explained variance, first {n}",
    "explained_variance_last": "explained variance, last {n}",
    "explained_variance_best": "explained variance, best {n} in a row",
}


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    name: str
    """The recipe's, without folder and ending."""
    seed: int
    folder: Path
    words: tuple[str, ...]
    """Recipe and fields, as `quintain train` takes them."""
    recipe: Recipe

    @property
    def budget(self) -> int:
        """Completions of the whole run."""
        assert self.recipe.config.max_steps is not None  # plan() has checked
        return self.recipe.config.completions_per_step * self.recipe.config.max_steps

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The run's metrics so far, one row a step."""
        return read_metrics(self.folder).rows if (self.folder / "metrics.jsonl").is_file() else []

    @property
    def finished(self) -> bool:
        rows = self.rows
        reached = bool(rows) and rows[-1]["step"] >= self.recipe.config.max_steps
        return reached and (self.folder / "model").is_dir()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the table.

    Returns the exit status. 0: done. 1: a run is not finished. 2: the command or a recipe is wrong. 130: interrupted.
    """
    options, words = parser().parse_known_args(arguments)
    try:
        jobs = plan(options, words)
    except QuintainError as error:
        print(f"compare_recipes: {error}", file=sys.stderr)
        return 2
    todo = [job for job in jobs if not job.finished]
    print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already.", file=sys.stderr)
    try:
        run_all(todo, at_once=options.jobs)
    except KeyboardInterrupt:
        print("compare_recipes: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    unfinished = [job for job in jobs if not job.finished]
    for job in unfinished:
        print(f"compare_recipes: {job.folder} is not finished; see {log_of(job)}.", file=sys.stderr)
    done = [job for job in jobs if job.finished]
    if done:
        results = summarise(done, options.edge_steps)
        write_results(results, done, options.output_dir, list(sys.argv[1:] if arguments is None else arguments))
    return 1 if unfinished else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="compare_recipes.py RECIPE [RECIPE ...] [options] [--field value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas; default 0,1,2")
    parser.add_argument(
        "--jobs", type=positive, default=1, help="runs at a time; with more than one, each has one thread"
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/compare"))
    parser.add_argument("--edge-steps", type=positive, default=5, metavar="N", help="steps of the first and last means")
    parser.add_argument(
        "--allow-different-budgets", action="store_true", help="compare recipes that sample different numbers"
    )
    return parser


# ---- what to run --------------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace, words: Sequence[str]) -> list[Job]:
    """Every run of the comparison, seed by seed, so that an early look compares like with like.

    Raises:
        ConfigError: a recipe cannot be read, budgets differ, or a run's folder holds a run with other settings.
    """
    recipes = list(takewhile(lambda word: not word.startswith("-"), words))
    fields = words[len(recipes) :]
    names = [Path(recipe).stem for recipe in recipes]
    if not recipes or len(set(names)) < len(names):
        raise ConfigError(f"name one or more different recipes before the options: got {recipes}.")
    stray, overrides = parse_arguments(fields)
    if stray or "seed" in overrides:
        raise ConfigError(
            f"after the recipes come options and fields, with seeds in --seeds: got {shlex.join(fields)}."
        )
    jobs = []
    for seed in read_seeds(options.seeds):
        for name, recipe in zip(names, recipes):
            folder = options.output_dir / name / f"seed-{seed}"
            run = {"seed": seed, "output_dir": str(folder)}
            jobs.append(Job(name, seed, folder, (recipe, *fields), load_recipe(recipe, {**overrides, **run})))
    require_budgets(jobs, may_differ=options.allow_different_budgets)
    for job in jobs:
        require_same_settings(job)
    return jobs


def read_seeds(text: str) -> list[int]:
    """Seeds from "0,1,2". Raises ConfigError if one is not a number or is there twice."""
    seeds = [int(part) if part.strip().isdecimal() else None for part in text.split(",")]
    if None in seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds must be different whole numbers separated by commas, such as 0,1,2: got {text!r}.")
    return [seed for seed in seeds if seed is not None]


def require_budgets(jobs: Sequence[Job], *, may_differ: bool) -> None:
    """Refuse recipes without a number of steps, and those that sample different numbers of completions."""
    for job in jobs:
        if job.recipe.config.max_steps is None:
            raise ConfigError(f"{job.name} does not say how many steps it takes. Give --max_steps.")
    budgets = {job.name: job.budget for job in jobs}
    if len(set(budgets.values())) > 1 and not may_differ:
        told = ", ".join(
            f"{job.name} samples {job.budget} ({job.recipe.config.completions_per_step} a step x "
            f"{job.recipe.config.max_steps} steps)"
            for job in {job.name: job for job in jobs}.values()
        )
        raise ConfigError(
            f"recipes are compared at the same number of completions: {told}. Give --max_steps (and "
            f"--prompts_per_step, --num_generations) for all of them, or --allow-different-budgets."
        )


def require_same_settings(job: Job) -> None:
    """Refuse to take a run with other settings for the one that is wanted. What a recipe leaves unset may differ."""
    path = job.folder / "config.yaml"
    if not path.is_file():
        return
    made = recipe_from_dict(read_recipe(path), {"output_dir": str(job.folder)}, source=str(path)).to_dict()
    wanted = job.recipe.to_dict()
    other = [key for key, value in wanted.items() if value is not None and made.get(key) != value]
    if other:
        told = ", ".join(f"{key}={made.get(key)!r} there and {wanted[key]!r} here" for key in other)
        raise ConfigError(f"{job.folder} holds a run with other settings: {told}. Choose another --output_dir.")


# ---- running ------------------------------------------------------------------------------------------------------


def run_all(jobs: Sequence[Job], *, at_once: int) -> None:
    """Make the runs, some at a time. After Ctrl-C, which each run in progress answers with a checkpoint, begin none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if at_once > 1 else dict(os.environ)
    pool = ThreadPoolExecutor(at_once)
    try:
        for future in [pool.submit(run_one, job, environment) for job in jobs]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def run_one(job: Job, environment: dict[str, str]) -> None:
    """Make or continue one run, its output in its log."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    words, started = command(job), time.monotonic()
    print(f"started  {job.folder}: quintain {shlex.join(words)}", file=sys.stderr, flush=True)
    with log_of(job).open("a", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, "-m", "quintain.cli.main", *words], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    told = f"exit status {done.returncode}, {time.monotonic() - started:.0f} seconds"
    print(f"ended    {job.folder}: {told}", file=sys.stderr, flush=True)


def command(job: Job) -> list[str]:
    """Arguments of `quintain` that make the run, or go on with it where it has a checkpoint."""
    if list_checkpoints(job.folder / "checkpoints"):
        return ["train", "--resume", str(job.folder)]
    return ["train", *job.words, "--seed", str(job.seed), "--output_dir", str(job.folder)]


def log_of(job: Job) -> Path:
    return job.folder.with_name(f"{job.folder.name}.log")


# ---- numbers ------------------------------------------------------------------------------------------------------


def summarise(jobs: Sequence[Job], edge_steps: int) -> dict[str, Any]:
    """Per recipe its seeds and their mean, and the differences between recipes paired by seed."""
    recipes: dict[str, Any] = {}
    for job in jobs:
        recipe = recipes.setdefault(job.name, {"completions": job.budget, "seeds": {}})
        recipe["seeds"][job.seed] = run_numbers(job.rows, edge_steps)
    for recipe in recipes.values():
        recipe["mean"] = intervals(recipe["seeds"].values())
    paired = [difference(recipes, first, second) for first, second in combinations(recipes, 2)]
    return {"edge_steps": edge_steps, "recipes": recipes, "paired": paired}


def run_numbers(rows: Sequence[dict[str, Any]], edge_steps: int) -> dict[str, float | None]:
    """What one run reached, under the names of `REWARDS`, `SPREAD`, and what it has of `EVALUATION` and `CRITIC`."""
    rewards = [row.get("reward") for row in rows]
    numbers = {
        "reward_first": mean(rewards[:edge_steps]),
        "reward_last": mean(rewards[-edge_steps:]),
        "reward_mean": mean(rewards),
        "reward_spread": step_to_step(rewards),
    }
    held_out = [row["eval_reward"] for row in rows if row.get("eval_reward") is not None]
    if held_out:
        numbers |= {"eval_reward_last": mean(held_out[-2:]), "eval_reward_best": max(held_out)}
    if any("loss/value" in row for row in rows):
        losses = [row.get("loss/value") for row in rows]
        explained = [row.get("explained_variance") for row in rows]
        numbers |= {
            "value_loss_first": mean(losses[:edge_steps]),
            "value_loss_last": mean(losses[-edge_steps:]),
            "explained_variance_first": mean(explained[:edge_steps]),
            "explained_variance_last": mean(explained[-edge_steps:]),
            "explained_variance_best": best_mean(explained, edge_steps),
        }
    return numbers


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are numbers; metrics.jsonl has null where a number was not finite."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def step_to_step(values: Sequence[float | None]) -> float | None:
    """Standard deviation of a step's reward about its trend: root mean square of the changes from step to step, by
    root 2, since a change holds the noise of two steps."""
    changes = [after - before for before, after in pairwise(value for value in values if value is not None)]
    return math.sqrt(fmean(change * change for change in changes) / 2) if changes else None


def best_mean(values: Sequence[float | None], window: int) -> float | None:
    """Largest mean of `window` values in a row, of which none may be missing; None if there is no such row."""
    windows = [values[start : start + window] for start in range(len(values) - window + 1)]
    means = [mean(part) for part in windows if None not in part]
    return max((value for value in means if value is not None), default=None)


def intervals(runs: Iterable[dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Mean and half-width of its 95% interval, for every number that all the runs have."""
    runs = list(runs)
    columns = {key: [run.get(key) for run in runs] for key in runs[0]} if runs else {}
    return {
        key: asdict(t_interval([value for value in values if value is not None]))
        for key, values in columns.items()
        if None not in values
    }


def difference(recipes: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    """First minus second in each seed that both have: there, both see the same prompts in the same order."""
    ours, theirs = recipes[first]["seeds"], recipes[second]["seeds"]
    seeds = [seed for seed in ours if seed in theirs]
    keys = [*REWARDS, *SPREAD, *EVALUATION]
    differences = {seed: {key: minus(ours[seed].get(key), theirs[seed].get(key)) for key in keys} for seed in seeds}
    return {"first": first, "second": second, "seeds": differences, "mean": intervals(differences.values())}


def minus(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second


# ---- what is written ----------------------------------------------------------------------------------------------


def write_results(results: dict[str, Any], jobs: Sequence[Job], folder: Path, arguments: Sequence[str]) -> None:
    """Print the table and fill the comparison's folder."""
    called = f"python benchmarks/compare_recipes.py {shlex.join(arguments)}"
    text = table(results)
    print(text)
    (folder / "table.md").write_text(f"    {called}\n\n{text}\n", encoding="utf-8")
    (folder / "results.json").write_text(json.dumps({"command": called, **results}, indent=1) + "\n", encoding="utf-8")
    plot(jobs).savefig(folder / "reward.png", dpi=150)
    if any("eval_reward" in row for job in jobs for row in job.rows):
        plot_held_out(jobs).savefig(folder / "eval_reward.png", dpi=150)
    write_report([job.folder for job in jobs], folder / "comparison.html")


def table(results: dict[str, Any]) -> str:
    """Two tables in Markdown: every run with the mean of its recipe, and the paired differences."""
    recipes, steps = results["recipes"], results["edge_steps"]
    optional = {**EVALUATION, **CRITIC}
    found = {key for recipe in recipes.values() for run in recipe["seeds"].values() for key in run}
    columns = {**REWARDS, **SPREAD, **{key: title for key, title in optional.items() if key in found}}
    paired = {key: title for key, title in columns.items() if key not in CRITIC}
    titles = [title.format(n=steps) for title in columns.values()]
    lines = table_header("recipe", "seed", "completions", *titles)
    for name, recipe in recipes.items():
        for seed, run in recipe["seeds"].items():
            cells = [number(run.get(key)) for key in columns]
            lines.append(table_row(name, seed, recipe["completions"], *cells))
        cells = [interval(recipe["mean"].get(key)) for key in columns]
        lines.append(table_row(f"**{name}**", "mean", recipe["completions"], *cells))
    if results["paired"]:
        lines += ["", "Difference in the same seed:", ""]
        lines += table_header("recipes", "seeds", *(title.format(n=steps) for title in paired.values()))
    for pair in results["paired"]:
        cells = [interval(pair["mean"].get(key)) for key in paired]
        lines.append(table_row(f"{pair['first']} - {pair['second']}", len(pair["seeds"]), *cells))
    return "\n".join(lines)


def number(value: float | None) -> str:
    # Rounded first, so that what is 0 but for rounding errors is written as 0; adding 0 turns -0 into 0.
    return "-" if value is None else f"{round(value, 6) + 0.0:.3g}"


def interval(found: dict[str, float | None] | None) -> str:
    """Mean and half-width, such as "0.52 ± 0.08"."""
    if found is None:
        return "-"
    half_width = found["half_width"]
    return number(found["mean"]) + ("" if half_width is None else f" ± {number(half_width)}")


def plot(jobs: Sequence[Job]) -> Figure:
    """Reward against completions sampled: every run, smoothed over five steps, one colour a recipe."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="completions sampled", ylabel="mean reward of a step")
    names = list(dict.fromkeys(job.name for job in jobs))
    for job in jobs:
        rows = [row for row in job.rows if row.get("reward") is not None]
        completions = [row["step"] * job.recipe.config.completions_per_step for row in rows]
        first = job is next(other for other in jobs if other.name == job.name)
        axes.plot(
            completions,
            smooth([row["reward"] for row in rows], 5),
            color=f"C{names.index(job.name)}",
            label=job.name if first else None,
        )
    axes.legend()
    return figure


def plot_held_out(jobs: Sequence[Job]) -> Figure:
    """Held-out reward against completions sampled and against the seconds of the steps, evaluation included."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_completions, by_seconds = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(job.name for job in jobs))
    for job in jobs:
        rows = job.rows
        seconds = list(accumulate(row.get("time/step") or 0.0 for row in rows))
        points = [(row, after) for row, after in zip(rows, seconds) if row.get("eval_reward") is not None]
        first = job is next(other for other in jobs if other.name == job.name)
        style: dict[str, Any] = {"color": f"C{names.index(job.name)}", "marker": "o", "markersize": 3}
        rewards = [row["eval_reward"] for row, _ in points]
        completions = [row["step"] * job.recipe.config.completions_per_step for row, _ in points]
        by_completions.plot(completions, rewards, label=job.name if first else None, **style)
        by_seconds.plot([after for _, after in points], rewards, **style)
    by_completions.set(xlabel="completions sampled", ylabel="mean reward on held-out prompts")
    by_seconds.set(xlabel="seconds")
    by_completions.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
