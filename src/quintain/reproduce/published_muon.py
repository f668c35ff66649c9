"""Muon as the paper's code applies it, which is not how `optim: muon` does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class PublishedMuon(Optimizer):
    """Muon for embeddings, positions, feed-forward and output matrices, Adam for attention and vectors.

    There, Muon takes tensors with two axes, and the library (flax) keeps attention's matrices with three. Its update of
    a matrix is scaled by the root of columns over rows where that is above 1, so that the table of two token embeddings
    moves 5.7 times as fast as a square matrix; torch's scales the transposed way round, which is the same for linear
    layers and 1 for such tables. Both take hidden matrices to the same update.

    Source: github.com/JeanKaddour/tpo, src/tpo/experiments/_trial.py and models.py, with optax.contrib.muon.

    Args:
        model: every parameter of which is trained.
        lr: of both.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        matrices: list[nn.Parameter] = []
        tables: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim != 2 or "attn" in name:
                others.append(parameter)
            else:
                (tables if "embed" in name else matrices).append(parameter)
        groups: list[dict[str, Any]] = [{"params": matrices, "lr": lr}]
        groups += [{"params": [table], "lr": lr * math.sqrt(max(1.0, _width_over_rows(table)))} for table in tables]
        self.muon = Muon(groups, lr=lr, weight_decay=0.0)
        self.adam = AdamW(others, lr=lr, weight_decay=0.0)
        super().__init__([*self.muon.param_groups, *self.adam.param_groups], {})
        # Shared, so that a schedule that sets the rates of these groups sets theirs.
        self.param_groups = [*self.muon.param_groups, *self.adam.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        self.muon.step()
        self.adam.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.muon.load_state_dict(state_dict["muon"])
        self.adam.load_state_dict(state_dict["adam"])
        self.param_groups = [*self.muon.param_groups, *self.adam.param_groups]


def _width_over_rows(table: nn.Parameter) -> float:
    """Of an embedding table; two rows of the positions' are never read, and no row of them counts."""
    rows, width = table.shape
    return width / (rows - 2 if rows > 2 else rows)
