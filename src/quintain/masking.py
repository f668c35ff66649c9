"""The only reductions over tokens. Every one names its mask; a masked entry may hold NaN and changes nothing."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, ""]:
    """Sum over the True entries. An empty mask gives 0, through which a gradient of 0 still flows."""
    return torch.where(mask, values, 0.0).sum()


def masked_row_sum(
    values: Float[Tensor, "batch completion"], mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, " batch"]:
    """Sum over the True entries of each row."""
    return torch.where(mask, values, 0.0).sum(dim=-1)


def masked_mean(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float[Tensor, ""]:
    """Mean over the True entries; 0 for an empty mask."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_variance(
    values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"], *, correction: int = 0
) -> Float[Tensor, ""]:
    """Variance over the True entries, divided by their number less `correction` (1: sample variance)."""
    centred = values - masked_mean(values, mask)
    return masked_sum(centred * centred, mask) / (mask.sum() - correction).clamp(min=1)


def masked_whiten(
    values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"], *, shift_mean: bool = True
) -> Float[Tensor, "*axes"]:
    """Scale the True entries to variance 1 and, unless `shift_mean` is off, to mean 0; the others become 0.

    Entries that are all equal come out as 0 (or unscaled when `shift_mean` is off): there is no spread to divide by.
    """
    mean, variance = masked_mean(values, mask), masked_variance(values, mask)
    spread = variance.sqrt()
    scale = torch.where(spread > 1e-6 * values.where(mask, 0.0).abs().max().clamp(min=1.0), spread, torch.inf)
    if not shift_mean:
        return torch.where(mask, values / torch.where(scale.isinf(), 1.0, scale), 0.0)
    return torch.where(mask, (values - mean) / scale, 0.0)
