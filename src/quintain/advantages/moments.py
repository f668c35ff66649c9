"""Mean and standard deviation of everything seen so far, for scores that are scaled as a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from quintain.masking import TIE_TOLERANCE


class RunningMoments:
    """Count, mean and sum of squared distances of a growing set of numbers; two sets merge exactly.

    Source: Chan, Golub and LeVeque 1983, The American Statistician 37(3), equations 1.5a and 1.5b.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def update(self, values: Float[Tensor, " batch"], total: Callable[[float], float] = float) -> None:
        """Take in a batch.

        Args:
            values: any finite numbers; none at all is allowed.
            total: adds up a number over data-parallel processes, each of which brings a part of the batch.
        """
        values = values.double()
        count = total(float(values.numel()))
        if count == 0:
            return
        mean = total(float(values.sum())) / count
        squares = total(float((values - mean).square().sum()))
        step, merged = mean - self.mean, self.count + count
        self.squares += squares + step * step * self.count * count / merged
        self.mean += step * count / merged
        self.count = merged

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    @property
    def scale(self) -> float:
        """What standardising multiplies by: 1 / std, or 1 where the numbers are equal up to rounding."""
        return 1.0 if self.std < TIE_TOLERANCE * max(1.0, abs(self.mean)) else 1.0 / self.std

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        vars(self).update(state)
