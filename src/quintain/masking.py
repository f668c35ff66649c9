"""The only reductions over tokens. Every one names its mask; a masked entry may hold NaN and changes nothing.

"Nothing" includes the gradient. Multiplying by 0, or selecting with `torch.where` after the arithmetic, is not enough:
the backward pass then computes 0 * NaN. Entries are therefore replaced before anything is done with them.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TIE_TOLERANCE = 1e-6
"""Relative to the largest value (at least 1): above float32's rounding, below any difference that a reward means."""


def zero_masked(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """`values` with 0 where the mask is False; no gradient passes there, not even a NaN.

    The per-token formulas take no mask. What they are given passes through here first if its padding may hold garbage.
    """
    return torch.where(mask, values, 0.0)


def masked_sum(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, ""]:
    """Sum over the True entries. An empty mask gives 0, through which a gradient of 0 still flows."""
    return zero_masked(values, mask).sum()


def masked_mean(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, ""]:
    """Mean over the True entries; 0 for an empty mask."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def sum_from_mean(mean: Float[Tensor, ""], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, ""]:
    """The sum over the True entries that this mean stands for; 0 for an empty mask, whose mean may be NaN."""
    return torch.where(mask.any(), mean * mask.sum(), 0.0)


def masked_row_sum(
    values: Float[Tensor, "batch completion"], mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, " batch"]:
    """Sum over the True entries of each row."""
    return zero_masked(values, mask).sum(dim=-1)


def masked_row_mean(
    values: Float[Tensor, "batch completion"], mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, " batch"]:
    """Mean over the True entries of each row; 0 for a row without any."""
    return masked_row_sum(values, mask) / mask.sum(dim=-1).clamp(min=1)


def masked_variance(
    values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"], *, correction: int = 0
) -> Float[Tensor, ""]:
    """Variance over the True entries, divided by their number less `correction` (1: sample variance)."""
    centred = zero_masked(values - masked_mean(values, mask), mask)
    return centred.square().sum() / (mask.sum() - correction).clamp(min=1)


def is_tied(spread: Float[Tensor, "*axes"], largest: Float[Tensor, "*axes"]) -> Bool[Tensor, "*axes"]:
    """Whether numbers with this standard deviation and largest size are equal up to rounding.

    spread < TIE_TOLERANCE * max(1, largest)
    """
    return spread < TIE_TOLERANCE * largest.clamp(min=1.0)


def masked_whiten(
    values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"], *, shift_mean: bool = True
) -> Float[Tensor, "*axes"]:
    """Scale the True entries to variance 1 and, unless `shift_mean` is off, to mean 0; the others become 0.

    Entries that are all equal come out as 0 (or unscaled when `shift_mean` is off): there is no spread to divide by.
    """
    values = zero_masked(values, mask)
    variance = masked_variance(values, mask)
    tied = is_tied(variance.detach().sqrt(), values.detach().abs().max())
    spread = torch.where(tied, 1.0, variance).sqrt()  # selected before the root, whose slope at 0 is infinite
    if not shift_mean:
        return values / spread
    return zero_masked((values - masked_mean(values, mask)) / spread, mask & ~tied)


def whitening_scale(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> float:
    """What `masked_whiten` multiplies differences between the True entries by; 1 where they are all equal."""
    if not bool(masked_whiten(values, mask).any()):
        return 1.0
    return 1.0 / float(masked_variance(zero_masked(values, mask), mask).sqrt())


def valid_ids(ids: Int[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"]) -> list[list[int]]:
    """Each row's counted token ids, in order. One transfer and one pass for the whole batch."""
    flat, lengths = ids[mask].tolist(), mask.sum(dim=1).tolist()
    return [flat[end - length : end] for length, end in zip(lengths, accumulate(lengths))]
