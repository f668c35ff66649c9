"""How prompts and completions are laid out for one forward pass: without padding in between, each prompt once.

The completions of a prompt share its tokens: a pack is [prompt | completion 1 | completion 2 | ...], in which every
completion sees the prompt and itself. A pack with one completion is an ordinary causal sequence, the plain reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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


def lay_out(rollouts: Rollouts, completions_per_pack: int) -> Layout:
    """Pack up to `completions_per_pack` completions of the same prompt together, rows in order."""
    prompts = [ids[mask].tolist() for ids, mask in zip(rollouts.prompt_ids, rollouts.prompt_mask)]
    completions = [ids[mask].tolist() for ids, mask in zip(rollouts.completion_ids, rollouts.completion_mask)]
    packs = _assign(prompts, completions_per_pack)
    ids, positions, segments = [], [], []
    where: dict[int, list[int]] = {}
    for rows in packs:
        prompt = prompts[rows[0]]
        tokens, places, owners = list(prompt), list(range(len(prompt))), [0] * len(prompt)
        for order, row in enumerate(rows, start=1):
            completion, start = completions[row], len(tokens)
            # The first token is predicted at the end of the prompt, each other one at the token before it.
            where[row] = [len(prompt) - 1, *range(start, start + len(completion) - 1)][: len(completion)]
            tokens += completion
            places += range(len(prompt), len(prompt) + len(completion))
            owners += [order] * len(completion)
        ids.append(tokens)
        positions.append(places)
        segments.append(owners)
    device = rollouts.completion_ids.device
    owner = _pad(segments, -1).to(device)
    offset = {row: number * owner.shape[1] for number, rows in enumerate(packs) for row in rows}
    predicting = [offset[row] + place for row in range(len(rollouts)) for place in where[row]]
    return Layout(
        input_ids=_pad(ids, 0).to(device),
        position_ids=_pad(positions, 0).to(device),
        attention_mask=(owner >= 0).long() if completions_per_pack == 1 else _who_sees_whom(owner),
        predicting=torch.tensor(predicting, dtype=torch.long, device=device),
        completion_mask=rollouts.completion_mask,
    )


def best_pack_size(rollouts: Rollouts, *, token_cost: float, pair_cost: float) -> int:
    """How many completions to put behind each prompt, for the least arithmetic.

    Sharing saves prompt tokens. But attention inside a pack is computed for all pairs of tokens, also for those of
    different completions, which see nothing of each other: with long completions, small packs are cheaper.

    Args:
        token_cost: operations a token, outside attention.
        pair_cost: operations a pair of tokens, in attention.
    """
    group = int(rollouts.group_ids.unique(return_counts=True)[1].max())
    prompt = float(rollouts.prompt_mask.sum(dim=1).float().mean())
    completion = float(rollouts.lengths.float().mean())

    def cost(size: int) -> float:
        tokens = prompt + size * completion
        return -(-group // size) * (tokens * token_cost + tokens * tokens * pair_cost)

    return min(range(1, group + 1), key=cost)


def _assign(prompts: Sequence[list[int]], size: int) -> list[list[int]]:
    """Rows of each pack: rows with equal prompts, at most `size` of them, filled as evenly as they divide."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(row)
    packs = []
    for rows in groups.values():
        number = -(-len(rows) // size)
        packs += [rows[len(rows) * part // number : len(rows) * (part + 1) // number] for part in range(number)]
    return packs


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
