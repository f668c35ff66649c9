"""A training step on a CUDA GPU beside TRL's: seconds, memory, and whether the numbers are right there. One command.

    pip install trl==1.16.0 "vllm<=0.31.0"     # without vLLM, or without both, what they would run is left out
    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --device cpu --model scratch:tiny --prompts 2 --group 4 --tokens 8    # tries the script

The sides: GRPO, TPO and PPO of this library, and GRPO of TRL with `generate` (`trl`) and with vLLM (`trl-vllm`). `tpo`
has no target policy and no KL, the same work as GRPO; `tpo-default` keeps an EMA target and KL to it. TRL 1.16 has no
PPO, so that `ppo`, with its value head and KL to the reference policy, stands beside TRL's GRPO too. All: the same
weights and prompts, completions of exactly `--tokens` tokens, one epoch, one optimizer step of AdamW at 1e-6,
temperature 1, a reward computed from the text, no checkpointing of activations, autocast to bfloat16 over float32
weights (`--dtype`). Micro-batches: `--micro-batch-tokens` here, `--trl-micro-batch` sequences in TRL.

First, numbers are checked in a process of their own:

    greedy      the engine's likeliest tokens are those of `generate(do_sample=False)`, in float32, ties excepted
    engine      log-probabilities that the engine reports, and
    trainer     those that the trainer computes, are those of a plain transformers pass
    sharing     the trainer's with shared prompts are its own with a copy of the prompt for every completion

In float32 they may differ by 1e-3 nats at most. In bfloat16 the mean difference from a plain float32 pass may be twice
that of a plain bfloat16 pass, and 1e-3 more; sharing, the same. Then every side is a process that stays alive and takes
a step in turn, with all work on the GPU finished before and after; the first step of each does not count. Memory is
what PyTorch had allocated and reserved at most during the steps. vLLM lives in TRL's process: its share of the GPU,
`--vllm-share`, is part of that number. After `--minutes`, what has been measured is reported. The exit status is 0, 1
if a check or a side failed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measuring import positive, reward, word_problem

SIDES = ("grpo", "tpo", "tpo-default", "ppo", "trl", "trl-vllm")
PHASES = ("generation", "forward", "backward", "optimizer", "rest")
"""`forward` includes passes without gradient, of reference and value models; `rest` is all else."""
FLOAT32_LIMIT = 1e-3
"""Nats; and the distance of two logits below which rounding may choose either token."""
STEPS = 10**6
"""What a trainer is told; the driver stops it before."""
PROMPT_TOKENS = 100
"""Most tokens of a prompt. A tokenizer of characters would make several hundred of a word problem."""
SHARED: dict[str, Any] = {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "temperature": 1.0}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="model reference")
    add("--sides", default="grpo,tpo,ppo,trl,trl-vllm", help=f"of {', '.join(SIDES)}")
    add("--prompts", type=positive, default=16, help="prompts a step; default 16")
    add("--group", type=positive, default=8, help="completions a prompt; default 8")
    add("--tokens", type=positive, default=256, help="of a completion; default 256")
    add("--rounds", type=positive, default=3, help="steps of each side that count; default 3")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="in which steps compute")
    add("--micro-batch-tokens", type=positive, default=16384, help="of this library; default 16384")
    add("--trl-micro-batch", type=positive, default=32, help="sequences; default 32")
    add("--vllm-share", type=float, default=0.3, help="of the GPU's memory, for vLLM; default 0.3, as in TRL")
    add("--minutes", type=float, default=9.0, help="after which no step begins; default 9")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    add("--worker", help=argparse.SUPPRESS)  # what a process is: a side, or "checks"
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    if options.worker:
        serve(options.worker)
        return 0
    if options.device == "cuda" and not cuda_is_there():
        print("gpu: PyTorch finds no CUDA GPU here. --device cpu tries the script without one.", file=sys.stderr)
        return 2
    completions = options.prompts * options.group
    options.trl_micro_batch = min(options.trl_micro_batch, completions)
    if completions % options.trl_micro_batch:
        raise SystemExit(f"gpu: --trl-micro-batch must divide the {completions} completions of a step.")
    wanted, left_out = choose_sides(options.sides.split(","), options.device)
    deadline = time.monotonic() + 60 * options.minutes
    results: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/gpu.py", *words]), "options": vars(options)}
    results |= {"checks": [], "sides": {}, "failed": {}, "left_out": left_out, "rounds": []}
    for part in (run_checks, run_sides):
        part(options, wanted, results, deadline)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    print(report(results))
    return int(bool(results["failed"]) or not all(check["passed"] for check in results["checks"]))


def cuda_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def choose_sides(names: Sequence[str], device: str) -> tuple[list[str], dict[str, str]]:
    """The sides that can run here, and why the others cannot. Raises SystemExit if a name is unknown."""
    chosen, left_out = [], {}
    for name in names:
        if name not in SIDES:
            raise SystemExit(f"gpu: unknown side {name!r}. Known: {', '.join(SIDES)}.")
        packages = {"trl": ("trl",), "trl-vllm": ("trl", "vllm")}.get(name, ())
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            left_out[name] = f"{' and '.join(missing)} not installed"
        elif name == "trl-vllm" and device == "cpu":
            left_out[name] = "only on a GPU"
        else:
            chosen.append(name)
    return chosen, left_out


# ---- prompts and reward, the same for all -------------------------------------------------------------------------


def load_prompts(model: str, number: int) -> tuple[Any, list[Any], list[list[int]]]:
    """The tokenizer; word problems, as chat, or as text where the tokenizer knows no chat; and their token ids."""
    from quintain.policies.loading import load_tokenizer

    tokenizer = load_tokenizer(model)

    def wrap(words: list[str]) -> tuple[Any, list[int]]:
        text = " ".join(words)
        if not tokenizer.chat_template:
            return text, tokenizer(text)["input_ids"]
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return chat, tokenizer(rendered, add_special_tokens=False)["input_ids"]

    pairs = []
    for index in range(number):
        words = word_problem(index).split(" ")
        while len(words) > 1 and len(wrap(words)[1]) > PROMPT_TOKENS:
            words.pop()
        pairs.append(wrap(words))
    return tokenizer, [prompt for prompt, _ in pairs], [ids for _, ids in pairs]


# ---- the sides, each in its process -------------------------------------------------------------------------------


def build_ours(case: argparse.Namespace, folder: str, meter: Meter, callback: Any) -> Any:
    import quintain
    from quintain.policies.loading import load_model

    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "grpo": (quintain.GRPOTrainer, {"beta": 0.0}),
        "tpo": (quintain.TPOTrainer, {"use_target_policy": False, "beta": 0.0}),
        "tpo-default": (quintain.TPOTrainer, {}),
        "ppo": (quintain.PPOTrainer, {}),
    }
    tokenizer, prompts, _ = load_prompts(case.model, case.prompts)
    trainer_class, own = kinds[case.side]
    args = our_config(case, trainer_class, folder, dtype=case.dtype, **own)
    data = [{"prompt": prompt} for prompt in prompts]
    score = meter.counting(reward)
    model = load_model(case.model)
    trainer = trainer_class(model, score, args, data, processing_class=tokenizer, callbacks=[callback])
    meter.time(trainer.engine, "generate", "generation")
    for method in ("annotate", "online"):
        meter.time(trainer.policies, method, "forward")
    meter.time(trainer, "loss", "forward")
    meter.time(trainer.accelerator, "backward", "backward")
    meter.time(trainer.optimizer, "step", "optimizer")
    return trainer


def our_config(case: argparse.Namespace, trainer_class: Any, folder: str, **own: Any) -> Any:
    return trainer_class.config_class(
        **SHARED,
        **own,
        output_dir=folder,
        prompts_per_step=case.prompts,
        num_generations=case.group,
        min_completion_length=case.tokens,
        max_completion_length=case.tokens,
        micro_batch_tokens=case.micro_batch_tokens,
        num_epochs=1,
        max_steps=STEPS,
        save_steps=None,
    )


def build_trl(case: argparse.Namespace, folder: str, meter: Meter, callback: Any) -> Any:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from quintain.policies.loading import load_model

    meter.time(torch.optim.AdamW, "step", "optimizer")
    tokenizer, prompts, ids = load_prompts(case.model, case.prompts)
    model = load_model(case.model)
    own: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": case.tokens}}
    if case.side == "trl-vllm":
        # vLLM finds a model by its name, and computes in the precision of the files; TRL then gives it the weights.
        load_model(case.model, dtype=case.dtype).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        model.name_or_path = model.config.name_or_path = f"{folder}/model"
        own = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": case.vllm_share,
            "vllm_max_model_length": max(map(len, ids)) + case.tokens,
            "generation_kwargs": {"min_tokens": case.tokens},
        }
    args = GRPOConfig(
        **SHARED,
        **own,
        output_dir=folder,
        per_device_train_batch_size=case.trl_micro_batch,
        gradient_accumulation_steps=case.prompts * case.group // case.trl_micro_batch,
        num_generations=case.group,
        max_completion_length=case.tokens,
        beta=0.0,
        max_steps=STEPS,
        bf16=case.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=case.device == "cpu",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    score = meter.counting(reward)
    trainer = GRPOTrainer(model, score, args, data, processing_class=tokenizer, callbacks=[callback])
    meter.time(trainer, "_generate", "generation")
    meter.time(trainer, "compute_loss", "forward")
    meter.time(trainer.accelerator, "backward", "backward")
    meter.time(trainer.accelerator, "clip_grad_norm_", "optimizer")
    return trainer


class Meter:
    """What a step takes, with all work on the device finished wherever the clock is read.

    A phase within another belongs to the outer one.
    """

    def __init__(self, device: str) -> None:
        self._cuda, self._inside = device == "cuda", False
        self.start()

    def now(self) -> float:
        if self._cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self.phases, self.tokens, self._started = dict.fromkeys(PHASES, 0.0), 0, self.now()

    def stop(self) -> dict[str, Any]:
        seconds = self.now() - self._started
        self.phases["rest"] = seconds - sum(self.phases.values())
        return {"seconds": seconds, "phases": self.phases, "tokens": self.tokens}

    def time(self, owner: Any, method: str, phase: str) -> None:
        """Time a method, unchanged, as a phase."""
        original = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return original(*arguments, **named)
            start, self._inside = self.now(), True
            try:
                return original(*arguments, **named)
            finally:
                self._inside = False
                self.phases[phase] += self.now() - start

        setattr(owner, method, timed)

    def counting(self, score: Callable[..., list[float]]) -> Callable[..., list[float]]:
        """The reward function, counting the tokens that it is given."""

        def reward(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
            self.tokens += sum(map(len, completion_ids))
            return score(completions, completion_ids, **columns)

        return reward


# ---- checks, in a process of their own ----------------------------------------------------------------------------


def check_numbers(case: argparse.Namespace) -> list[dict[str, Any]]:
    """Every check: its `name`, what was `found`, the `limit`, and whether it `passed`."""
    import torch

    from quintain import GRPOTrainer
    from quintain.policies.loading import load_model

    torch.set_float32_matmul_precision("highest")
    case = argparse.Namespace(**{**vars(case), "prompts": min(case.prompts, 4), "tokens": min(case.tokens, 64)})
    tokenizer, prompts, ids = load_prompts(case.model, case.prompts)
    plain = load_model(case.model).to(case.device)
    checks = [check_greedy(case, plain, ids)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for dtype in ("float32", "bfloat16"):
            args = our_config(case, GRPOTrainer, folder, dtype=dtype)
            data = [{"prompt": prompt} for prompt in prompts]
            trainer = GRPOTrainer(load_model(case.model), reward, args, data, processing_class=tokenizer)
            rollouts = trainer.generate_rollouts()
            ours = trainer.policies.online(rollouts).logprobs
            shared, trainer.policies.module.shares_prompts = trainer.policies.module.shares_prompts, False
            repeated = trainer.policies.online(rollouts).logprobs
            exact = plain_logprobs(plain, rollouts)
            with torch.autocast(case.device, torch.bfloat16, enabled=dtype == "bfloat16"):
                rounded = plain_logprobs(plain, rollouts)
            distances = {
                "engine": rollouts.sampling_logprobs - exact,
                "trainer": ours - exact,
                "sharing" if shared else "sharing (the model cannot: both plain)": ours - repeated,
            }
            checks += [judged(f"{name}, {dtype}", apart, rounded - exact, dtype) for name, apart in distances.items()]
    return checks


def judged(name: str, difference: Any, rounding: Any, dtype: str) -> dict[str, Any]:
    """A check of log-probabilities: the largest difference in float32; in bfloat16 the mean, beside rounding's own."""
    if dtype == "float32":
        found, limit = float(difference.abs().max()), FLOAT32_LIMIT
    else:
        found, limit = float(difference.abs().mean()), 2 * float(rounding.abs().mean()) + FLOAT32_LIMIT
    return {"name": name, "found": found, "limit": limit, "passed": found <= limit}


def plain_logprobs(model: Any, rollouts: Any) -> Any:
    """Log-probabilities of every completion, `[batch, completion]`, at temperature 1, a row at a time."""
    import torch

    rows = []
    for prompt, mask, completion in zip(rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids):
        ids = torch.cat([prompt[mask], completion])
        logits = model(ids[None], use_cache=False).logits[0, -len(completion) - 1 : -1].float()
        rows.append(logits.log_softmax(dim=-1).gather(1, completion[:, None])[:, 0])
    return torch.stack(rows)


def check_greedy(case: argparse.Namespace, plain: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """The engine's greedy tokens beside `generate`'s: `found` is the largest distance of two logits that differed."""
    import torch
    from transformers import GenerationConfig

    from quintain.policies.loading import load_model
    from quintain.rollout.native import NativeEngine
    from quintain.types import SamplingParams

    sampling = SamplingParams(
        num_generations=case.group, max_completion_length=case.tokens, stop_token_ids=(), pad_token_id=0, top_k=1
    )
    engine = NativeEngine(load_model(case.model).to(case.device))
    ours = engine.generate(prompts, sampling, torch.Generator().manual_seed(0)).completion_ids
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=case.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=case.device)
    plain.generation_config = GenerationConfig()  # or its stop tokens would be taken
    config = GenerationConfig(do_sample=False, max_new_tokens=case.tokens, pad_token_id=0)
    with torch.inference_mode():
        theirs = plain.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]
    theirs, equal, gap = theirs.repeat_interleave(case.group, dim=0), 0, 0.0
    for row, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if torch.equal(found, expected):
            equal += 1
            continue
        first = int((found != expected).nonzero()[0, 0])
        context = torch.tensor([*prompts[row // case.group], *expected[:first]], device=case.device)
        with torch.inference_mode():
            logits = plain(context[None], use_cache=False).logits[0, -1]
        gap = max(gap, float((logits[expected[first]] - logits[found[first]]).abs()))
    name = f"greedy, float32: {equal} of {len(ours)} completions of {case.tokens} tokens equal"
    return {"name": name, "found": gap, "limit": FLOAT32_LIMIT, "passed": gap <= FLOAT32_LIMIT}


# ---- the two ends of the pipe -------------------------------------------------------------------------------------


class Finished(Exception):
    """Raised out of a trainer's loop when the driver wants no more steps."""


class Failed(Exception):
    """A process has ended, or kept the driver waiting for too long."""


def serve(side: str) -> None:
    """A process: the checks; or one side, which takes a step at each request and tells on the pipe what it took."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the pipe is for answers alone; whatever the libraries print goes to the errors

    def send(message: Any) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    case = argparse.Namespace(**json.loads(sys.stdin.readline()), side=side)
    import torch
    from transformers import TrainerCallback
    from transformers.utils import logging

    logging.disable_progress_bar()
    if side == "checks":
        return send(check_numbers(case))
    meter, on_gpu = Meter(case.device), case.device == "cuda"

    def wait() -> None:
        if sys.stdin.readline().strip() != "step":
            raise Finished
        meter.start()

    class Turns(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = meter.stop()
            if on_gpu:
                step["allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
                step["reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
            send(step)
            wait()

    with tempfile.TemporaryDirectory() as folder:
        trainer = (build_trl if side.startswith("trl") else build_ours)(case, folder, meter, Turns())
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        send(facts_of(side))
        with suppress(Finished):
            wait()
            trainer.train()


def facts_of(side: str) -> dict[str, Any]:
    """What ran: versions, and the GPU."""
    import torch

    names = ["torch", "transformers", *(["trl"] if side.startswith("trl") else ["quintain"])]
    names += ["vllm"] if side == "trl-vllm" else []
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"versions": versions, "gpu": gpu, "cuda": torch.version.cuda}


class Worker:
    """A process, as the driver sees it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        if options.device == "cpu":
            environment["ACCELERATE_USE_CPU"] = "true"
        command, pipe = [sys.executable, __file__, "--worker", name], subprocess.PIPE
        self.process: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
        )
        self.tell(json.dumps(vars(options), default=str))

    def tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # then there will be no answer either
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answer(self, deadline: float) -> Any:
        """Wait for the next line. Raises Failed if there is none before the deadline."""
        if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise Failed("the time was up")
        reply = self.process.stdout.readline()
        if not reply:
            raise Failed(f"its process ended with status {self.process.wait()}; its words are above")
        return json.loads(reply)

    def close(self) -> None:
        """End the process, in whatever state it is, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


# ---- the driver ---------------------------------------------------------------------------------------------------


def run_checks(options: argparse.Namespace, _wanted: list[str], results: dict[str, Any], deadline: float) -> None:
    print("checks start", file=sys.stderr)
    worker = Worker("checks", options)
    try:
        results["checks"] = worker.answer(deadline)
    except Failed as error:
        results["failed"]["checks"] = str(error)
    finally:
        worker.close()


def run_sides(options: argparse.Namespace, wanted: list[str], results: dict[str, Any], deadline: float) -> None:
    """Start the sides, let them take turns until enough rounds are made or the time is up, and sum up."""
    workers: dict[str, Worker] = {}
    try:
        # vLLM measures how much memory is free, so nobody else may start meanwhile.
        for batch in ([name for name in wanted if name == "trl-vllm"], [name for name in wanted if name != "trl-vllm"]):
            workers |= {name: Worker(name, options) for name in batch}
            for name in batch:
                if (facts := ask(workers, name, results, deadline)) is not None:
                    results["sides"][name] = facts
        for number in range(options.rounds + 1):
            started = time.monotonic()
            steps = take_round(workers, wanted, results, deadline)
            if number:
                results["rounds"].append(steps)
            if 2 * time.monotonic() - started > deadline:  # another round would not fit
                break
    finally:
        for worker in workers.values():
            worker.close()


def take_round(
    workers: dict[str, Worker], wanted: list[str], results: dict[str, Any], deadline: float
) -> dict[str, Any]:
    steps, tokens = {}, results["options"]["prompts"] * results["options"]["group"] * results["options"]["tokens"]
    for name in [name for name in wanted if name in workers]:
        workers[name].tell("step")
        step = ask(workers, name, results, deadline)
        if step is not None and step["tokens"] != tokens:
            results["failed"][name] = f"it sampled {step['tokens']} tokens, and {tokens} are wanted"
            workers.pop(name).close()
        elif step is not None:
            steps[name] = step
            print(f"  {name}: {step['seconds']:.2f} s", file=sys.stderr)
    return steps


def ask(workers: dict[str, Worker], name: str, results: dict[str, Any], deadline: float) -> Any:
    """A process's answer; None if it failed, which is noted, and the others go on without it."""
    try:
        return workers[name].answer(deadline)
    except Failed as error:
        results["failed"][name] = str(error)
        workers.pop(name).close()
        return None


# ---- report -------------------------------------------------------------------------------------------------------


def report(results: Mapping[str, Any]) -> str:
    """The results as tables in Markdown, with what it takes to judge and to repeat them."""
    from quintain.report.markdown import table_header, table_row

    options, rounds, facts = results["options"], results["rounds"], list(results["sides"].values())
    lines = [
        f"{options['model']}, {options['prompts']} prompts x {options['group']} completions of {options['tokens']} "
        f"tokens, {options['dtype']}, {facts[0]['gpu'] or 'no GPU' if facts else options['device']}.",
        "Seconds of a step: median (least to greatest). Ratios: a side's time / TRL's, in the same round.",
        "",
        *table_header("side", "seconds", "tokens/s", "x trl", "x trl-vllm", "allocated, GB", "reserved, GB", *PHASES),
        *(table_row(*cells(name, options, rounds)) for name in SIDES if any(name in taken for taken in rounds)),
        "",
        *table_header("check", "found", "limit", "passed"),
        *(
            table_row(
                check["name"], f"{check['found']:.1e}", f"{check['limit']:.1e}", "yes" if check["passed"] else "NO"
            )
            for check in results["checks"]
        ),
        "",
        *([f"The time was up after {len(rounds)} rounds of {options['rounds']}."] * (len(rounds) < options["rounds"])),
        *(f"failed: {name}: {why}." for name, why in results["failed"].items()),
        *(f"left out: {name}: {why}." for name, why in results["left_out"].items()),
    ]
    found = {" ".join(item): 0 for fact in facts for item in fact["versions"].items()}
    cuda = f", CUDA {facts[0]['cuda']}" if facts and facts[0]["cuda"] else ""
    return "\n".join([*lines, f"Versions: {', '.join(found)}{cuda}", f"Command: {results['command']}"])


def cells(name: str, options: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    steps = [taken[name] for taken in rounds if name in taken]
    seconds = [step["seconds"] for step in steps]
    yield name
    yield numbers(seconds, "{:.3f}")
    yield f"{options['prompts'] * options['group'] * options['tokens'] / median(seconds):.0f}"
    for other in ("trl", "trl-vllm"):
        both = [taken for taken in rounds if name in taken and other in taken]
        yield numbers([taken[name]["seconds"] / taken[other]["seconds"] for taken in both], "{:.2f}")
    for memory in ("allocated_gb", "reserved_gb"):
        yield f"{max(step[memory] for step in steps):.2f}" if memory in steps[0] else "-"
    for phase in PHASES:
        yield f"{fmean(step['phases'][phase] for step in steps):.3f}"


def numbers(values: Sequence[float], style: str) -> str:
    """The median and, of several values, their range: "1.50 (1.00 to 2.00)"."""
    if not values:
        return "-"
    text = style.format(median(values))
    return text if len(values) == 1 else f"{text} ({style.format(min(values))} to {style.format(max(values))})"


if __name__ == "__main__":
    sys.exit(main())
