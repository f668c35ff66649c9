"""How prompts and completions are laid out for one forward pass.

Where the model can attend by a plan, all tokens stand on one axis without padding, each prompt once: [prompt 1 |
completion 1 | completion 2 | ... | prompt 2 | ...]. Otherwise every completion is a row with its own copy of the
prompt, padded on the right: the plain reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quintain.attention import SharedPrompts, as_mask
from quintain.masking import valid_ids
from quintain.types import Rollouts


@dataclass(frozen=True)
class Layout:
    """Model inputs for a batch of rollouts, and where each completion token's prediction comes out."""

    input_ids: Int[Tensor, "sequences tokens"]
    position_ids: Int[Tensor, "sequences tokens"]
    attention_mask: Tensor
    """A mask of valid tokens, `[sequences, tokens]`, as any model takes it; or a plan, in the form of a mask."""
    predicting: Int[Tensor, " valid"]
    """Position, counted over all sequences, whose hidden state predicts each valid completion token, in row order."""
    rollouts: Rollouts

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for a transformers model."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
        }

    @property
    def completion_ids(self) -> Int[Tensor, " valid"]:
        """The valid completion tokens, in row order."""
        return self.rollouts.completion_ids[self.rollouts.completion_mask]

    def gather(self, hidden: Float[Tensor, "sequences tokens width"]) -> Float[Tensor, "valid width"]:
        """The hidden states that predict the valid completion tokens."""
        # index_select, whose backward pass adds in a fixed order: the end of a prompt predicts several first tokens.
        return hidden.flatten(0, 1).index_select(0, self.predicting)

    def scatter(self, values: Float[Tensor, " valid"]) -> Float[Tensor, "batch completion"]:
        """One number a valid token, at its place; 0 elsewhere."""
        mask = self.rollouts.completion_mask
        return values.new_zeros(mask.shape).masked_scatter(mask, values)


def share_prompts(rollouts: Rollouts) -> Layout:
    """All tokens on one axis: each distinct prompt once, and behind it each of its distinct completions once.

    A completion sampled twice is computed once. Its last token predicts nothing, so it is no input.
    """
    ids: list[int] = []
    positions: list[int] = []
    prompts: list[tuple[int, int]] = []
    completions: list[tuple[int, int, int]] = []
    predicting: list[list[int]] = [[] for _ in range(len(rollouts))]
    for prompt, members in _sequences(rollouts).items():
        end = len(ids) + len(prompt)
        prompts.append((len(ids), len(prompt)))
        ids += prompt
        positions += range(len(prompt))
        for completion, rows in members.items():
            start, inputs = len(ids), len(completion) - 1
            completions.append((start, max(inputs, 0), len(prompts) - 1))
            ids += completion[:-1]
            positions += range(len(prompt), len(prompt) + inputs)
            # The first token is predicted at the end of the prompt, each other one at the token before it.
            places = [end - 1, *range(start, start + inputs)][: len(completion)]
            for row in rows:
                predicting[row] = places
    device = rollouts.completion_ids.device
    return Layout(
        input_ids=torch.tensor([ids], dtype=torch.long, device=device),
        position_ids=torch.tensor([positions], dtype=torch.long, device=device),
        attention_mask=as_mask(SharedPrompts(prompts, completions).to(device), device),
        predicting=torch.tensor([place for row in predicting for place in row], dtype=torch.long, device=device),
        rollouts=rollouts,
    )


def repeat_prompts(rollouts: Rollouts) -> Layout:
    """One sequence a row, the prompt in front of its completion, padded on the right."""
    prompts = valid_ids(rollouts.prompt_ids, rollouts.prompt_mask)
    completions = valid_ids(rollouts.completion_ids, rollouts.completion_mask)
    # The last token predicts nothing, so it is no input.
    sequences = [prompt + completion[:-1] for prompt, completion in zip(prompts, completions, strict=True)]
    width = max(len(sequence) for sequence in sequences)
    padding = [width - len(sequence) for sequence in sequences]
    predicting = [
        row * width + len(prompt) - 1 + offset
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        for offset in range(len(completion))
    ]

    def tensor(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=rollouts.completion_ids.device)

    return Layout(
        input_ids=tensor([sequence + [0] * more for sequence, more in zip(sequences, padding)]),
        position_ids=tensor([[*range(width - more), *[0] * more] for more in padding]),
        attention_mask=tensor([[1] * (width - more) + [0] * more for more in padding]),
        predicting=tensor(predicting),
        rollouts=rollouts,
    )


Sequences = dict[tuple[int, ...], dict[tuple[int, ...], list[int]]]
"""Rows that hold each completion, by prompt and then by completion, in order of first appearance."""


def _sequences(rollouts: Rollouts) -> Sequences:
    sequences: Sequences = {}
    prompts = valid_ids(rollouts.prompt_ids, rollouts.prompt_mask)
    completions = valid_ids(rollouts.completion_ids, rollouts.completion_mask)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        sequences.setdefault(tuple(prompt), {}).setdefault(tuple(completion), []).append(row)
    return sequences
