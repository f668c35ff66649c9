"""Reductions over groups of rows: the completions of one prompt, wherever they stand in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quintain.masking import is_tied, zero_masked


@dataclass(frozen=True)
class Segments:
    """Which group each row is in and which rows count. Groups may differ in size and their rows come in any order.

    Results of the methods have one entry a group, in ascending order of group id; `[index]` spreads them over the rows.
    A row that does not count may hold NaN and changes nothing, gradients included.
    """

    index: Int[Tensor, " batch"]
    """Position of the row's group among the groups, from 0."""
    counted: Bool[Tensor, " batch"]
    number: int

    @classmethod
    def of(cls, group_ids: Int[Tensor, " batch"], counted: Bool[Tensor, " batch"]) -> Segments:
        """`group_ids` are any integers, equal for rows of one group."""
        distinct, index = torch.unique(group_ids, return_inverse=True)
        return cls(index=index, counted=counted, number=len(distinct))

    def sum(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " groups"]:
        """Sum over the counted rows; 0 for a group without any."""
        return values.new_zeros(self.number).index_add(0, self.index, zero_masked(values, self.counted))

    def count(self) -> Int[Tensor, " groups"]:
        """Number of counted rows."""
        return self.index.new_zeros(self.number).index_add(0, self.index, self.counted.to(self.index.dtype))

    def mean(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " groups"]:
        """Mean over the counted rows; 0 for a group without any."""
        return self.sum(values) / self.count().clamp(min=1)

    def max(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " groups"]:
        """Largest counted value; minus infinity for a group without any."""
        lowest = values.new_full((self.number,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, torch.where(self.counted, values, -torch.inf), "amax")

    def centred(self, values: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Each counted value less its group's mean; 0 elsewhere, and exactly 0 throughout a tied group."""
        return zero_masked(values - self.mean(values)[self.index], self.counted & ~self.tied(values)[self.index])

    def spread(self, values: Float[Tensor, " batch"], *, correction: int) -> Float[Tensor, " groups"]:
        """Standard deviation over the counted rows, dividing by their number less `correction`."""
        deviations = values - self.mean(values)[self.index]
        return (self.sum(deviations.square()) / (self.count() - correction).clamp(min=1)).sqrt()

    def standardised(self, values: Float[Tensor, " batch"], *, correction: int) -> Float[Tensor, " batch"]:
        """`centred`, in units of the group's `spread`."""
        spread = torch.where(self.tied(values), 1.0, self.spread(values, correction=correction))
        return self.centred(values) / spread[self.index]

    def tied(self, values: Float[Tensor, " batch"]) -> Bool[Tensor, " groups"]:
        """Whether a group's counted values are equal up to rounding; so is a group with one counted row or none."""
        return is_tied(self.spread(values, correction=0), self.max(values.abs()))
