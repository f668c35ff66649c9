"""Seconds of a training step on a tiny run: this library beside a plain PyTorch loop written for the one task.

    python benchmarks/tiny_step.py
    python benchmarks/tiny_step.py --length 3 --pairs 3 --steps 2 --cases start --algorithms tpo --json tiny.json

Both sides do the steps of `quintain.reproduce` (token reversal, 100 prompts x 8 completions, 4 epochs, Muon) with the
same network from the same weights, on one thread of the CPU: sample with a key-value cache, score, compute the old
log-probabilities in a pass of their own, update. The plain loop knows its task: no text, no masks, no statistics, no
log. The library does all that it does by default, but checkpoints and the log of completions.

    start           the policy as it is initialised: few completions repeat another. The limit is for this case
    start-unshared  the same, but the library reads a prompt once a completion, as the plain loop does
    converged       a sharpened output layer: few distinct completions, each of which the library computes once

The learning rate is so small that the policy stays as it is in all measured steps. The sides take turns, so that a slow
moment of the machine meets both. What other processes take shows as time on the clock without time on the processor;
where that is much, the ratio of processor time is the one to read. All of it takes two to three minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from measuring import positive
from torch import Tensor, nn

from quintain import GRPOConfig, GRPOTrainer, TPOConfig, TPOTrainer
from quintain.reproduce.task import (
    FEED_FORWARD,
    HEADS,
    LAYERS,
    SYMBOLS,
    WIDTH,
    exact_reversal,
    reversal_network,
    reversal_prompts,
    reversal_tokenizer,
)

ALGORITHMS = ("tpo", "grpo")
CASES = ("start", "start-unshared", "converged")
LIMIT = 1.3
"""Seconds that the library may take in the case "start", as a multiple of the plain loop's."""
PROMPTS, GROUP, EPOCHS = 100, 8, 4
CLIP_RANGE, KL_COEF = 0.2, 0.04
"""Of GRPO."""
STANDSTILL = 1e-9
"""A learning rate at which nothing is learnt."""
SHARPENING = 10.0
"""Factor on the output layer in the case "converged": most tokens then have a probability near 0 or 1."""
WARM_UP_STEPS = 2
"""Steps of each side before the first that counts."""
FOREIGN_LOAD = 0.1
"""Share of a block's seconds by which clock and processor may differ before the measurement counts as disturbed."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    results = [measure(case, algorithm, options) for algorithm in options.algorithms for case in options.cases]
    print(report(results, options))
    if options.json:
        record = {"command": words, "torch": torch.__version__, "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--length", type=positive, default=7, help="tokens of a prompt, and of its completions")
    parser.add_argument("--pairs", type=positive, default=5, help="how often each side has its turn")
    parser.add_argument("--steps", type=positive, default=5, help="training steps a turn")
    parser.add_argument("--algorithms", type=some_of(ALGORITHMS), default=ALGORITHMS, metavar=",".join(ALGORITHMS))
    parser.add_argument("--cases", type=some_of(CASES), default=CASES, metavar=",".join(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the seconds of every step here")
    return parser


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of the known names, with commas in between."""

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}. Known: {', '.join(known)}")
        return found

    return names


# ---- the plain loop -----------------------------------------------------------------------------------------------

KeysAndValues: TypeAlias = tuple[Tensor, Tensor]
"""What a layer remembers: keys and values, each `[batch, heads, tokens, head_size]`."""
Pairs: TypeAlias = Float[Tensor, "prompts group"]


class Block(nn.Module):
    """Causal attention and feed-forward, each behind a layer norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, FEED_FORWARD), nn.Linear(FEED_FORWARD, WIDTH)

    def forward(self, x: Tensor, past: KeysAndValues | None) -> tuple[Tensor, KeysAndValues]:
        normed = self.attention_norm(x)
        query, key, value = (
            part(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.feed_norm(x)), approximate="tanh"))
        return x, (key, value)


class PlainTransformer(nn.Module):
    """The network of `reversal_network`, for sequences that all have the same length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(SYMBOLS), WIDTH), nn.Embedding(2 * length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(SYMBOLS), bias=False)

    def forward(
        self, ids: Int[Tensor, "batch tokens"], past: Sequence[KeysAndValues] | None = None
    ) -> tuple[Float[Tensor, "batch tokens width"], list[KeysAndValues]]:
        """Hidden states, to which `head` is yet to be applied, and what the layers remember."""
        start = past[0][0].shape[2] if past else 0
        x = self.token(ids) + self.position.weight[start : start + ids.shape[1]]
        memory = []
        for index, block in enumerate(self.blocks):
            x, remembered = block(x, past[index] if past else None)
            memory.append(remembered)
        return self.norm(x), memory

    def logprobs(
        self, prompts: Int[Tensor, "batch length"], completions: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length"]:
        """Log-probabilities of the completions' tokens, in nats."""
        hidden, _ = self(torch.cat([prompts, completions[:, :-1]], dim=1))
        logits = self.head(hidden[:, prompts.shape[1] - 1 :])
        return logits.log_softmax(dim=-1).gather(-1, completions[..., None]).squeeze(-1)

    @torch.no_grad()
    def sample(self, prompts: Int[Tensor, "prompts length"]) -> Int[Tensor, "batch length"]:
        """GROUP completions of each prompt, as long as it is; each prompt is read once."""
        hidden, past = self(prompts)
        hidden = hidden[:, -1:].repeat_interleave(GROUP, dim=0)
        past = [(keys.repeat_interleave(GROUP, 0), values.repeat_interleave(GROUP, 0)) for keys, values in past]
        tokens: list[Tensor] = []
        while True:
            tokens.append(torch.multinomial(self.head(hidden[:, -1]).softmax(dim=-1), 1))
            if len(tokens) == prompts.shape[1]:
                return torch.cat(tokens, dim=1)
            hidden, past = self(tokens[-1], past)


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Weights of a `reversal_network`, by their names in `PlainTransformer`."""
    decoder = network.model.decoder
    parts = {"token": decoder.embed_tokens, "norm": decoder.final_layer_norm, "head": network.lm_head}
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        own = {"attention_norm": layer.self_attn_layer_norm, "feed_norm": layer.final_layer_norm}
        own |= {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj}
        own |= {"out": attention.out_proj, "up": layer.fc1, "down": layer.fc2}
        parts |= {f"blocks.{index}.{name}": part for name, part in own.items()}
    weights = {f"{name}.{kind}": value for name, part in parts.items() for kind, value in part.named_parameters()}
    # Its first two rows are for padding, of which there is none.
    weights["position.weight"] = decoder.embed_positions.weight[decoder.embed_positions.offset :]
    return weights


def standardised(rewards: Pairs) -> Pairs:
    """Mean 0 and population standard deviation 1 over each group; 0 where all are equal."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.std(dim=1, correction=0, keepdim=True)
    return torch.where(spread > 0, centred / spread, 0.0)


def tpo_loss(logprobs: Float[Tensor, "batch length"], old: Float[Tensor, "batch length"], scores: Pairs) -> Tensor:
    """Cross-entropy of each group to its target, with summed log-probabilities. arXiv:2604.06159, eqs. 1-3."""
    target = (old.sum(dim=1).view_as(scores) + scores).softmax(dim=1)
    return -(target * logprobs.sum(dim=1).view_as(scores).log_softmax(dim=1)).sum(dim=1).mean()


def grpo_loss(logprobs: Float[Tensor, "batch length"], old: Float[Tensor, "batch length"], scores: Pairs) -> Tensor:
    """Clipped surrogate and k3 towards the policy that sampled, averaged over tokens. arXiv:2402.03300, eqs. 3-4."""
    advantages, log_ratio = scores.view(-1, 1), logprobs - old
    ratio = log_ratio.exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantages)
    kl = torch.exp(-log_ratio) - 1 + log_ratio
    return (KL_COEF * kl - gain).mean()


class PlainLoop:
    """The whole training of one task by one algorithm, with nothing else."""

    def __init__(self, algorithm: str, network: nn.Module, length: int, learning_rate: float) -> None:
        self.length, self.loss = length, {"tpo": tpo_loss, "grpo": grpo_loss}[algorithm]
        self.model = PlainTransformer(length)
        self.model.load_state_dict(weights_of(network))
        matrices = [weight for weight in self.model.blocks.parameters() if weight.ndim == 2]
        others = [weight for weight in self.model.parameters() if all(weight is not matrix for matrix in matrices)]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0),
            torch.optim.AdamW(others, lr=learning_rate, weight_decay=0.0),
        ]

    def step(self) -> None:
        """One training step."""
        prompts = torch.randint(len(SYMBOLS), (PROMPTS, self.length))
        completions = self.model.sample(prompts)
        prompts = prompts.repeat_interleave(GROUP, dim=0)
        rewards = (completions == prompts.flip(1)).all(dim=1).float()
        self.fit(prompts, completions, rewards)
        self.sampled = prompts, completions

    def work(self) -> Work:
        """What the last step had to do."""
        prompts, completions = self.sampled
        return Work(tokens=len(prompts) * (2 * self.length - 1), distinct=number_distinct(prompts, completions))

    def fit(self, prompts: Tensor, completions: Tensor, rewards: Float[Tensor, " batch"]) -> None:
        """EPOCHS updates. Completions of a prompt stand together."""
        scores = standardised(rewards.view(-1, GROUP))
        with torch.no_grad():
            old = self.model.logprobs(prompts, completions)
        for _ in range(EPOCHS):
            self.loss(self.model.logprobs(prompts, completions), old, scores).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()


@dataclass(frozen=True)
class Work:
    """What a step had to do."""

    tokens: int
    """That a forward pass of the update reads, padding included."""
    distinct: int
    """Sequences (prompt and completion) that differ."""


def number_distinct(prompts: Int[Tensor, "batch length"], completions: Int[Tensor, "batch length"]) -> int:
    return len(torch.cat([prompts, completions], dim=1).unique(dim=0))


# ---- the library --------------------------------------------------------------------------------------------------


def build_trainer(
    algorithm: str, network: nn.Module, length: int, *, steps: int, seed: int, output_dir: str, learning_rate: float
) -> TPOTrainer | GRPOTrainer:
    """A trainer that takes the same steps as `PlainLoop`."""
    settings: dict[str, Any] = {
        "output_dir": output_dir,
        "prompts_per_step": PROMPTS,
        "num_generations": GROUP,
        "num_epochs": EPOCHS,
        "max_steps": steps,
        "min_completion_length": length,
        "max_completion_length": length,
        "micro_batch_tokens": 10**6,  # all of it at once
        "optim": "muon",
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": None,
        "save_steps": None,
        "log_completions": False,
        "seed": seed,
    }
    trainer_class: type[TPOTrainer] | type[GRPOTrainer]
    args: TPOConfig | GRPOConfig
    if algorithm == "tpo":
        trainer_class = TPOTrainer
        args = TPOConfig(**settings, group_logits="logprob", use_target_policy=False, beta=0.0)
    else:
        trainer_class = GRPOTrainer
        args = GRPOConfig(
            **settings,
            epsilon=CLIP_RANGE,
            group_std="population",
            beta=KL_COEF,
            kl_reference="old",
            kl_estimator="k3",
        )
    return trainer_class(
        model=network,
        processing_class=reversal_tokenizer(),
        reward_funcs=exact_reversal,
        args=args,
        train_dataset=reversal_prompts(length, PROMPTS * steps, seed),
    )


class LibraryLoop:
    """The steps of `trainer.train()`, one at a time, inside the trainer's session."""

    def __init__(self, trainer: TPOTrainer | GRPOTrainer) -> None:
        self.trainer = trainer

    def step(self) -> None:
        """One training step, and what surrounds it: the row in metrics.jsonl, the console, the doctor's rules."""
        statistics = self.trainer.run_step()
        self.trainer.run.finish_step(statistics)
        self.rollouts = statistics.rollouts

    def work(self) -> Work:
        """What the last step had to do."""
        rollouts = self.rollouts
        assert rollouts is not None  # a step leaves them
        return Work(
            tokens=self.trainer.policies.module.lay_out(rollouts).input_ids.numel(),
            distinct=number_distinct(rollouts.prompt_ids, rollouts.completion_ids),
        )


# ---- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Some steps of one side in a row; seconds of each, on the clock and of this process on the processor."""

    wall: list[float]
    cpu: list[float]

    @property
    def disturbed(self) -> bool:
        """Whether this process waited, for other processes or a disk, or did work on other threads."""
        return abs(sum(self.wall) - sum(self.cpu)) > FOREIGN_LOAD * sum(self.wall)


@dataclass(frozen=True)
class Result:
    """One case of one algorithm. Turn i of both sides make pair i."""

    algorithm: str
    case: str
    library: list[Turn]
    plain: list[Turn]
    library_work: Work
    plain_work: Work

    @property
    def disturbed(self) -> int:
        """Number of turns that were."""
        return sum(turn.disturbed for turn in self.library + self.plain)


def measure(case: str, algorithm: str, options: argparse.Namespace) -> Result:
    """Give both sides their turns on the case's policy."""
    torch.manual_seed(options.seed)
    network = reversal_network(options.length, options.seed)
    if case == "converged":
        network.lm_head.weight.data *= SHARPENING
    plain = PlainLoop(algorithm, network, options.length, STANDSTILL)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(
            algorithm,
            network,
            options.length,
            steps=WARM_UP_STEPS + options.pairs * options.steps,
            seed=options.seed,
            output_dir=folder,
            learning_rate=STANDSTILL,
        )
        if case == "start-unshared":
            trainer.policies.module.shares_prompts = False
        library = LibraryLoop(trainer)
        turns: dict[Any, list[Turn]] = {library: [], plain: []}
        with (Path(folder) / "console.txt").open("w") as console, redirect_stderr(console), trainer.run.session():
            for side in turns:
                take_turn(side.step, WARM_UP_STEPS)
            for pair in range(options.pairs):
                for side in reversed(turns) if pair % 2 else turns:
                    turns[side].append(take_turn(side.step, options.steps))
    return Result(algorithm, case, turns[library], turns[plain], library.work(), plain.work())


def take_turn(step: Callable[[], None], number: int) -> Turn:
    """Time so many steps."""
    gc.collect()  # so that no side cleans up after the other
    wall, cpu = [], []
    for _ in range(number):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
    return Turn(wall, cpu)


def seconds(turns: Iterable[Turn], clock: str) -> list[float]:
    """Of every step, by "wall" or "cpu" clock."""
    return [value for turn in turns for value in getattr(turn, clock)]


def ratio(result: Result, clock: str) -> float:
    """Median step of the library over median step of the plain loop."""
    return median(seconds(result.library, clock)) / median(seconds(result.plain, clock))


def pair_ratios(result: Result, clock: str) -> list[float]:
    """The library's seconds over the plain loop's, in each pair of turns."""
    pairs = zip(result.library, result.plain, strict=True)
    return [sum(getattr(library, clock)) / sum(getattr(plain, clock)) for library, plain in pairs]


# ---- the report ---------------------------------------------------------------------------------------------------


def report(results: Sequence[Result], options: argparse.Namespace) -> str:
    """The table in Markdown, what disturbed the measurement, and whether the library keeps to its limit."""
    lines = [
        f"Token reversal of {options.length} tokens, {PROMPTS} prompts x {GROUP} completions, {EPOCHS} epochs, one "
        f"thread; {options.pairs} pairs of turns of {options.steps} steps; torch {torch.__version__}.",
        "Seconds of a step: median (quartiles). Ratios of medians, library to plain loop (least to greatest of pairs).",
        "",
        "| algorithm | case | library | plain loop | ratio | ratio of processor time | tokens a pass "
        "| distinct sequences |",
        "|---|---|---|---|---|---|---|---|",
        *(table_row(result) for result in results),
        "",
    ]
    for result in results:
        if result.disturbed:
            lines.append(
                f"warning: {result.algorithm}, {result.case}: in {result.disturbed} of "
                f"{len(result.library + result.plain)} turns, seconds on the clock and on the processor differ by more "
                f"than {FOREIGN_LOAD:.0%}. Other processes were in the way: read the ratio of processor time, or "
                f"measure again."
            )
    lines += [verdict(result) for result in results if result.case == "start"]
    return "\n".join(lines)


def table_row(result: Result) -> str:
    cells = [
        result.algorithm,
        result.case,
        spread(seconds(result.library, "wall")),
        spread(seconds(result.plain, "wall")),
        *(
            f"{ratio(result, clock):.2f} ({min(found):.2f} to {max(found):.2f})"
            for clock in ("wall", "cpu")
            for found in [pair_ratios(result, clock)]
        ),
        f"{result.library_work.tokens:,} / {result.plain_work.tokens:,}",
        f"{result.library_work.distinct} / {result.plain_work.distinct}",
    ]
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    """Median and, where there are several values, quartiles."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def verdict(result: Result) -> str:
    """Whether the case "start" keeps to the limit, by the clock that can be trusted."""
    clock = "cpu" if result.disturbed else "wall"
    measured = f"{ratio(result, clock):.2f} {'of processor time' if result.disturbed else 'on the clock'}"
    within = ratio(result, clock) <= LIMIT
    return f"{result.algorithm} within {LIMIT} x the plain loop: {'yes' if within else 'no'} ({measured})"


if __name__ == "__main__":
    main()
