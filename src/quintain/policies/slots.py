"""The policies a trainer can read: online, old, ref and the EMA target.

Only the online policy is a module. The others are slots: copies of the trainable parameters, swapped into the same
module for the length of a forward pass. A slot of a LoRA run is therefore adapter-sized, and the frozen weights exist
once. `old` has a slot only where the exact KL to it is asked for; otherwise its recorded log-probabilities are enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

SlotName = Literal["ref", "old", "target"]


class Slot:
    """A detached copy of some parameters: no gradient, not optimised, saved with the run.

    Args:
        full_precision: keep half-precision parameters in float32. An average needs it: bfloat16 has 8 bits, so that a
            hundredth of a small difference is rounded away, and the target would stand still.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, full_precision: bool = False) -> None:
        self.tensors = {
            name: parameter.detach().to(_full(parameter.dtype) if full_precision else parameter.dtype, copy=True)
            for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def copy(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Become the given parameters."""
        for name, tensor in self.tensors.items():
            tensor.copy_(parameters[name])

    @torch.no_grad()
    def blend(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """Exponential moving average: tensor = decay * tensor + (1 - decay) * parameter (S7)."""
        for name, tensor in self.tensors.items():
            tensor.lerp_(parameters[name].detach().to(tensor.dtype), 1.0 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])


@contextmanager
def swapped(parameters: Mapping[str, nn.Parameter], slot: Slot) -> Iterator[None]:
    """Let the module compute with the slot's weights. Pointers move; no weight is copied but to another precision.

    The caller must be under `no_grad`: autograd would otherwise save the slot's tensors as if they were the parameters.
    """
    live = {name: parameters[name].data for name in slot.tensors}
    try:
        for name, tensor in slot.tensors.items():
            parameters[name].data = tensor.to(parameters[name].dtype)
        yield
    finally:
        for name, tensor in live.items():
            parameters[name].data = tensor


def _full(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class TargetUpdate:
    """How the target follows the online policy, applied once after every optimizer step (S8).

    Args:
        decay: EMA decay in (0, 1); None for a periodic copy.
        every: act on every n-th optimizer step only; >= 1.
    """

    def __init__(self, *, decay: float | None, every: int = 1) -> None:
        self.decay, self.every, self.steps = decay, every, 0

    def __call__(self, target: Slot, parameters: Mapping[str, nn.Parameter]) -> None:
        self.steps += 1
        if self.steps % self.every:
            return
        if self.decay is None:
            target.copy(parameters)
        else:
            target.blend(parameters, self.decay)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = int(state["steps"])
