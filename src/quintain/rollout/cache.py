"""A key-value cache that writes in place; transformers' own grows by copying everything at every token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

States = Float[Tensor, "batch heads tokens head_size"]


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values, in tensors that have room for the whole sequence from the start.

    Sliding-window layers use it too: it keeps every token, and transformers masks those outside the window when the
    cache does not drop them itself.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._length = 0

    def lazy_initialization(self, key_states: States, value_states: States) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def update(self, key_states: States, value_states: States, *args: Any, **kwargs: Any) -> tuple[States, States]:
        """Append tokens; returns views of all tokens so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        # narrow() raises when the room is used up; a slice would be empty, and one token would vanish into it.
        self.keys.narrow(2, self._length, tokens).copy_(key_states)
        self.values.narrow(2, self._length, tokens).copy_(value_states)
        self._length += tokens
        return self.keys[:, :, : self._length], self.values[:, :, : self._length]

    def get_seq_length(self) -> int:
        return self._length

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        """Keep the given rows, in that order; a row may be given several times."""
        self.keys, self.values = self._select(self.keys, indices), self._select(self.values, indices)

    def _select(self, states: States, indices: Int[Tensor, " rows"]) -> States:
        rows = states[:, :, : self._length].index_select(0, indices)
        # Fewer rows fit into the memory that is there already.
        room = states[: len(indices)] if len(indices) <= len(states) else self._empty(rows)
        room[:, :, : self._length] = rows
        return room

    def _empty(self, like: States) -> States:
        rows, heads, _, head_size = like.shape
        return torch.empty(rows, heads, self._capacity, head_size, dtype=like.dtype, device=like.device)


def preallocated_cache(capacity: int) -> Cache:
    """A cache for `capacity` tokens a row; layers and rows are those of the first forward pass."""
    return Cache(layer_class_to_replicate=partial(PreallocatedLayer, capacity))  # type: ignore[arg-type]
