"""How evenly a group shares its weight: the effective group size of real completions under each `group_logits` of TPO.

    python benchmarks/group_sizes.py --tokens 24,64,256

Samples groups from the model of a recipe before any training, all completions cut at the same number of tokens, and
prints for each length, averaged over groups:

    spread        standard deviation of a group's summed log-probabilities, in nats
    logprob       effective size 1 / sum p^2 for p = softmax(summed log-probabilities), the paper's form
    averaged      the same for mean log-probabilities a token
    tempered      the same for sums scaled down until half of the group shares the weight; `scale` is the factor
    logratio      is always the whole group, since a policy's log-ratio to itself is 0
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintain.cli.train import build_trainer
from quintain.configs.load import load_recipe
from quintain.masking import masked_row_mean, masked_row_sum
from quintain.objectives.target_matching import effective_group_size, group_softmax, tempered_scale
from quintain.report.markdown import table_header, table_row
from quintain.segments import Segments
from quintain.types import Rollouts

COLUMNS = ("tokens", "groups", "length", "spread", "logprob", "averaged", "tempered", "scale")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every length and print a table in Markdown."""
    options = parser().parse_args(arguments)
    rows = []
    for tokens in [int(part) for part in options.tokens.split(",")]:
        rows.append(measure(options.recipe, tokens, prompts=options.prompts, group=options.group, seed=options.seed))
        print(f"{tokens} tokens done", file=sys.stderr, flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--recipe", default="quickstart", help="whose model and prompts; default quickstart")
    parser.add_argument("--tokens", default="24,64,256", help="lengths, separated by commas; default 24,64,256")
    parser.add_argument("--prompts", type=int, default=8, help="groups of each length; default 8")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt, 2 or more; default 8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser


def measure(recipe: str, tokens: int, *, prompts: int, group: int, seed: int) -> dict[str, Any]:
    """One row of the table: what a batch of completions of up to `tokens` tokens looks like."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "algorithm": "tpo",
            "output_dir": folder,
            "prompts_per_step": prompts,
            "num_generations": group,
            "max_completion_length": tokens,
            "min_completion_length": tokens,
            "max_steps": 1,
            "seed": seed,
        }
        rollouts = build_trainer(load_recipe(recipe, overrides)).generate_rollouts()
    return {"tokens": tokens, "groups": prompts, **sizes(rollouts, group)}


def sizes(rollouts: Rollouts, group: int) -> dict[str, float]:
    """Means over the groups, by the names in the table."""
    logprobs, mask, groups = rollouts.sampling_logprobs, rollouts.completion_mask, rollouts.group_ids
    everyone = torch.ones(len(rollouts), dtype=torch.bool)
    sums, averages = masked_row_sum(logprobs, mask), masked_row_mean(logprobs, mask)
    scale = tempered_scale(sums, groups, everyone, min_effective_group=group / 2, group_size=group)

    def size(logits: Tensor) -> float:
        weights = group_softmax(logits, groups, everyone)
        return float(effective_group_size(weights, groups, everyone).mean())

    return {
        "length": float(mask.sum(dim=1).float().mean()),
        "spread": float(Segments.of(groups, everyone).spread(sums, correction=1).mean()),
        "logprob": size(sums),
        "averaged": size(averages),
        "tempered": size(sums * scale),
        "scale": float(scale.mean()),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    return "\n".join([*table_header(*COLUMNS), *(table_row(*(f"{row[name]:.3g}" for name in COLUMNS)) for row in rows)])


if __name__ == "__main__":
    sys.exit(main())
