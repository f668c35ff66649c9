"""Means with intervals: how far the mean over a few seeds may be from the mean over all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom. Beyond, the last one makes the interval a bit wide.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


@dataclass(frozen=True)
class Interval:
    """A mean, and half the width of its 95% interval; None for one value alone, which has none."""

    mean: float
    half_width: float | None


def t_interval(values: Sequence[float]) -> Interval:
    """The mean of one or more values with its 95% interval of Student's t."""
    if len(values) < 2:
        return Interval(values[0], None)
    quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(len(values)))
