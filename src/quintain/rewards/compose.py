"""From each function's scores to one total per completion: placing intermediate rewards, weights, clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quintain.rewards.checks import Score


def row_totals(scores: Sequence[Score]) -> Float[Tensor, " batch"]:
    """Each row's number, the sum of its intermediate rewards, or NaN where it was not scored."""
    totals = [float("nan") if row is None else sum(row) if isinstance(row, list) else row for row in scores]
    return torch.tensor(totals, dtype=torch.float64)


def place_intermediate(
    scores: Sequence[Score], mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, "batch completion"] | None:
    """Intermediate rewards on the tokens that earned them; None if no row has any.

    A row's k numbers belong to k segments of equal length that cover its valid tokens; each number lands on its
    segment's last token, the last one on the completion's last token:

        token of number j = ceil((j + 1) * length / k) - 1

    With as many numbers as valid tokens that is one number a token. With more numbers than tokens, neighbours share a
    token and add up. A completion without a token keeps its total and has nowhere to put its parts.
    """
    if not any(isinstance(row, list) for row in scores):
        return None
    placed = torch.zeros(mask.shape, dtype=torch.float64)
    for row, numbers in enumerate(scores):
        if isinstance(numbers, list):
            tokens = mask[row].nonzero().flatten().tolist()
            for segment, number in enumerate(numbers if tokens else ()):
                last = -(-(segment + 1) * len(tokens) // len(numbers)) - 1
                placed[row, tokens[last]] += number
    return placed


def combine_intermediate(
    scores: Sequence[Sequence[Score]], weights: Sequence[float], mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, "batch completion"] | None:
    """The weighted sum of all functions' intermediate rewards; None if no function of non-zero weight gave any."""
    placed = [
        weight * parts
        for rows, weight in zip(scores, weights)
        if weight != 0 and (parts := place_intermediate(rows, mask)) is not None
    ]
    return torch.stack(placed).sum(dim=0) if placed else None


def combine(
    components: Sequence[Float[Tensor, " batch"]], weights: Sequence[float]
) -> tuple[Float[Tensor, " batch"], Bool[Tensor, " batch"]]:
    """The weighted sum over the functions that scored a row, and which rows were scored at all.

    A function of weight 0 is looked at only: it neither adds to a total nor makes a row count as scored. Weights are
    not rescaled where some functions returned None.

    Args:
        components: one function's numbers each, NaN where it returned None.
    Returns:
        Totals, 0 where not scored; and the mask of scored rows.
    """
    totals = torch.zeros_like(components[0])
    scored = torch.zeros_like(components[0], dtype=torch.bool)
    for component, weight in zip(components, weights):
        if weight != 0:
            present = ~component.isnan()
            totals = totals + weight * component.where(present, 0.0)
            scored = scored | present
    return totals, scored


def clip_totals(
    totals: Float[Tensor, " batch"], bounds: tuple[float, float]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Totals kept within `bounds`, and what to multiply each row's intermediate rewards by.

    They shrink as the total does, so that no part of a clipped reward is taken back on the last token; the factor
    stays in [0, 1], so that none changes its sign or grows.
    """
    clipped = totals.clamp(*bounds)
    factor = torch.where(clipped == totals, 1.0, clipped / totals)
    return clipped, factor.nan_to_num(1.0).clamp(0.0, 1.0)
