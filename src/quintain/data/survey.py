"""A look at every prompt before training starts."""

from __future__ import annotations

from dataclasses import dataclass

from datasets import Dataset

from quintain.data.prompts import PromptFormat, missing_prompt_column
from quintain.errors import DataError


@dataclass(frozen=True)
class Survey:
    """What was found: which rows can be used, how long each prompt is, and how many were too long."""

    kept: list[int]
    """Numbers of the rows that can be used."""
    lengths: list[int]
    """Tokens of every row's prompt, before any cut."""
    num_dropped: int
    num_cut: int


def survey(dataset: Dataset, prompt_format: PromptFormat) -> Survey:
    """Check and measure every prompt, so that a fault shows before training and not in the middle of it.

    Raises:
        DataError: a prompt is unusable, or none is left.
    """
    if "prompt" not in dataset.column_names:
        raise DataError(missing_prompt_column(dataset.column_names))
    kept: list[int] = []
    lengths: list[int] = []
    num_cut = 0
    prompts = dataset.select_columns("prompt")
    for start in range(0, len(prompts), 1000):
        indices = range(start, min(start + 1000, len(prompts)))
        for index, item in zip(indices, prompt_format.encode(list(prompts.select(indices)), indices)):
            lengths.append(item.length)
            num_cut += item.outcome == "cut"
            if item.outcome != "dropped":
                kept.append(index)
    if not kept:
        raise DataError(
            f"No prompt is left: all {len(lengths)} have more than max_prompt_length={prompt_format.max_prompt_length} "
            f"tokens (the shortest has {min(lengths, default=0)}). Raise max_prompt_length."
        )
    return Survey(kept, lengths, len(lengths) - len(kept), num_cut)
