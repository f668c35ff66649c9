"""How prompts and completions are laid out for one forward pass: without padding in between, each prompt once.

The completions of a prompt share its tokens: a pack is [prompt | completion 1 | completion 2 | ...], in which every
completion sees the prompt and itself. A pack with one completion is an ordinary causal sequence, the plain reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quintain.masking import valid_ids
from quintain.types import Rollouts


@dataclass(frozen=True)
class Layout:
    """Model inputs for a batch of rollouts, and where each completion token's prediction comes out."""

    input_ids: Int[Tensor, "packs tokens"]
    position_ids: Int[Tensor, "packs tokens"]
    attention_mask: Int[Tensor, "packs tokens"] | Bool[Tensor, "packs 1 tokens tokens"]
    """Two axes where every pack holds one completion, as any model takes it; else who sees whom."""
    predicting: Int[Tensor, " valid"]
    """Position, counted over all packs, whose hidden state predicts each valid completion token, in row order."""
    completion_mask: Bool[Tensor, "batch completion"]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for a transformers model."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
        }

    def gather(self, hidden: Float[Tensor, "packs tokens width"]) -> Float[Tensor, "valid width"]:
        """The hidden states that predict the valid completion tokens."""
        # index_select, whose backward pass adds in a fixed order: the end of a prompt predicts several first tokens.
        return hidden.flatten(0, 1).index_select(0, self.predicting)

    def scatter(self, values: Float[Tensor, " valid"]) -> Float[Tensor, "batch completion"]:
        """One number a valid token, at its place; 0 elsewhere."""
        return values.new_zeros(self.completion_mask.shape).masked_scatter(self.completion_mask, values)


@dataclass(frozen=True)
class PackingCost:
    """What a forward pass costs, in operations, to choose how many completions go behind each prompt."""

    token: float
    """Of a token, outside attention."""
    pair: float
    """Of a pair of tokens, in attention."""


Sequences = dict[tuple[int, ...], dict[tuple[int, ...], list[int]]]
"""Rows that hold each completion, by prompt and then by completion, in order of first appearance."""


def lay_out(rollouts: Rollouts, packing: int | PackingCost) -> Layout:
    """Pack distinct completions of the same prompt together; a completion sampled twice is computed once.

    Args:
        packing: most completions of a pack, or the costs by which to choose that number.
    """
    sequences = _sequences(rollouts)
    size = packing if isinstance(packing, int) else best_pack_size(sequences, packing)
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    owners: list[list[int]] = []
    where: dict[int, tuple[int, list[int]]] = {}
    for prompt, completions in sequences.items():
        for part in _parts(list(completions), size):
            tokens, places, segments = list(prompt), list(range(len(prompt))), [0] * len(prompt)
            for order, completion in enumerate(part, start=1):
                # The first token is predicted at the end of the prompt, each other one at the token before it.
                start = len(tokens)
                predicting = [len(prompt) - 1, *range(start, start + len(completion) - 1)][: len(completion)]
                where.update(dict.fromkeys(completions[completion], (len(ids), predicting)))
                # The last token predicts nothing, so it is no input.
                tokens += completion[:-1]
                places += range(len(prompt), len(prompt) + len(completion) - 1)
                segments += [order] * (len(completion) - 1)
            ids.append(tokens)
            positions.append(places)
            owners.append(segments)
    device = rollouts.completion_ids.device
    owner = _pad(owners, -1).to(device)
    width = owner.shape[1]
    predicting = [
        pack * width + place for pack, places in map(where.__getitem__, range(len(rollouts))) for place in places
    ]
    return Layout(
        input_ids=_pad(ids, 0).to(device),
        position_ids=_pad(positions, 0).to(device),
        attention_mask=(owner >= 0).long() if size == 1 else _who_sees_whom(owner),
        predicting=torch.tensor(predicting, dtype=torch.long, device=device),
        completion_mask=rollouts.completion_mask,
    )


def best_pack_size(sequences: Sequences, cost: PackingCost) -> int:
    """How many completions to put behind each prompt, for the least arithmetic, padding included.

    Sharing saves prompt tokens. But attention inside a pack is computed for all pairs of tokens, also for those of
    different completions, which see nothing of each other: with long completions, small packs are cheaper.
    """
    groups = [len(completions) for completions in sequences.values()]
    prompt = fmean(map(len, sequences))
    completion = fmean(max(len(ids) - 1, 0) for completions in sequences.values() for ids in completions)

    def total(size: int) -> float:
        packs = [-(-group // size) for group in groups]
        longest = max(-(-group // number) for group, number in zip(groups, packs))
        width = prompt + longest * completion
        return sum(packs) * (width * cost.token + width * width * cost.pair)

    return min(range(1, max(groups) + 1), key=total)


def _sequences(rollouts: Rollouts) -> Sequences:
    sequences: Sequences = {}
    prompts = valid_ids(rollouts.prompt_ids, rollouts.prompt_mask)
    completions = valid_ids(rollouts.completion_ids, rollouts.completion_mask)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        sequences.setdefault(tuple(prompt), {}).setdefault(tuple(completion), []).append(row)
    return sequences


def _parts(items: Sequence[tuple[int, ...]], size: int) -> list[Sequence[tuple[int, ...]]]:
    """At most `size` of the items each, filled as evenly as they divide."""
    number = -(-len(items) // size)
    return [items[len(items) * part // number : len(items) * (part + 1) // number] for part in range(number)]


def _who_sees_whom(owner: Int[Tensor, "packs tokens"]) -> Bool[Tensor, "packs 1 tokens tokens"]:
    """True where the row's token may attend to the column's: an earlier one of the prompt (0) or its own completion.

    Padding (-1) sees the first token, since a row without any would turn into NaN; nothing sees padding.
    """
    tokens = owner.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=owner.device).tril()
    query, key = owner[:, :, None], owner[:, None, :]
    seen = earlier & ((key == 0) | (key == query)) & (key >= 0)
    seen[:, :, 0] |= owner < 0
    return seen[:, None]


def _pad(rows: Sequence[Sequence[int]], value: int) -> Int[Tensor, "packs tokens"]:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long)
