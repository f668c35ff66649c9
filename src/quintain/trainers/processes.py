"""Numbers that data-parallel processes must agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer


class AcrossProcesses:
    """Methods of `OnlineRLTrainer` that add up over all processes; each returns the same number in every process."""

    def sum_over_processes(self: OnlineRLTrainer, value: float) -> float:  # type: ignore[misc]
        """A sum of numbers, or of counts."""
        if self.accelerator.num_processes == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)))

    def mean_over_processes(self: OnlineRLTrainer, value: float) -> float:  # type: ignore[misc]
        """A mean, for what all processes must decide alike."""
        return self.sum_over_processes(value) / self.accelerator.num_processes
