"""Key-value caches that write in place; transformers' own grows by copying everything at every token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

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


class GroupLayer(DynamicLayer):
    """One layer's keys and values: each prompt's once, and each row's own in a tensor with room for all of them."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: GroupCache, prompt_keys: States, prompt_values: States) -> None:
        super().__init__()
        self._cache = cache
        self.prompt_keys, self.prompt_values = prompt_keys, prompt_values
        self.keys, self.values = cache.room_for(0, prompt_keys), cache.room_for(0, prompt_values)
        self.is_initialized = True

    def update(self, key_states: States, value_states: States, *args: Any, **kwargs: Any) -> tuple[States, States]:
        """Store one token a row; attention reads the store itself."""
        self._cache.write(self.keys, key_states)
        self._cache.write(self.values, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._cache.tokens_read


class GroupCache(Cache):
    """The cache of rows that continue shared prompts, and the plan by which they attend to both (`attention.py`).

    A row's attention is a softmax over its prompt's tokens and its own. The rows of a prompt are multiplied with its
    keys together, as one matrix, so that no prompt is copied.

    Args:
        room: most tokens of its own that a row ever stores.
    """

    layers: list[GroupLayer]  # type: ignore[assignment]

    def __init__(self, room: int) -> None:
        super().__init__(layers=[])
        self._room = room
        self._prompt_mask: Bool[Tensor, "prompts tokens"] | None = None
        self._owner: Int[Tensor, " rows"] = torch.empty(0, dtype=torch.long)
        self._lengths: Int[Tensor, " rows"] = torch.empty(0, dtype=torch.long)
        self._width = 0
        self._in_step = True

    @property
    def tokens_read(self) -> int:
        """Tokens of the longest row, its prompt included."""
        return self._width + (0 if self._prompt_mask is None else self._prompt_mask.shape[1])

    def join(self, prompts: DynamicCache, prompt_mask: Bool[Tensor, "prompts tokens"], rows: Sequence[int]) -> None:
        """Add prompts, left-padded, and as many rows behind each of them as `rows` says."""
        first = 0 if self._prompt_mask is None else len(self._prompt_mask)
        old_mask = self._prompt_mask
        for index, read in enumerate(prompts.layers):
            assert read.keys is not None and read.values is not None
            if index == len(self.layers):
                self.layers.append(GroupLayer(self, read.keys[:0], read.values[:0]))
            layer = self.layers[index]
            layer.prompt_keys = _stack(layer.prompt_keys, read.keys)
            layer.prompt_values = _stack(layer.prompt_values, read.values)
            for name in ("keys", "values"):
                stored = getattr(layer, name)
                grown = self.room_for(len(self._owner) + sum(rows), stored)
                grown[: len(stored)] = stored
                setattr(layer, name, grown)
        if old_mask is not None:
            width = max(old_mask.shape[1], prompt_mask.shape[1])
            prompt_mask = torch.cat([pad(mask, (width - mask.shape[1], 0)) for mask in (old_mask, prompt_mask)])
        self._prompt_mask = prompt_mask
        device = prompt_mask.device
        counts = torch.tensor(rows, dtype=torch.long, device=device)
        owners = torch.arange(first, first + len(rows), device=device).repeat_interleave(counts)
        self._owner = torch.cat([self._owner.to(device), owners])
        self._lengths = torch.cat([self._lengths.to(device), torch.zeros_like(owners)])
        self._arrange()

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the given rows, in ascending order, and the prompts that they continue."""
        assert self._prompt_mask is not None
        self._owner, self._lengths = self._owner[rows], self._lengths[rows]
        kept, self._owner = self._owner.unique(sorted=True, return_inverse=True)
        drop = len(kept) < len(self._prompt_mask)
        if drop:
            self._prompt_mask = self._prompt_mask[kept]
        self._width = int(self._lengths.max()) if len(rows) else 0
        for layer in self.layers:
            for name in ("keys", "values"):
                stored = getattr(layer, name)
                stored[: len(rows), :, : self._width] = stored[:, :, : self._width].index_select(0, rows)
                setattr(layer, name, stored[: len(rows)])
            if drop:
                layer.prompt_keys = layer.prompt_keys.index_select(0, kept)
                layer.prompt_values = layer.prompt_values.index_select(0, kept)
        self._arrange()

    def advance(self) -> None:
        """Make place for the next token of each row."""
        self._lengths = self._lengths + 1
        self._width += 1

    def room_for(self, rows: int, like: States) -> States:
        """Uninitialised states of the given number of rows."""
        return torch.empty(rows, like.shape[1], self._room, like.shape[3], dtype=like.dtype, device=like.device)

    def write(self, stored: States, states: States) -> None:
        """Put each row's newest token at its place."""
        if self._in_step:
            stored.narrow(2, self._width - 1, 1).copy_(states)
        else:
            rows = torch.arange(len(states), device=states.device)
            stored[rows, :, self._lengths - 1] = states[:, :, 0].to(stored.dtype)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """One token a row; its key and value are in the store already."""
        store = self.layers[layer]
        rows, heads, _, size = queries.shape
        key_heads = store.keys.shape[1]
        queries = queries.reshape(rows, key_heads, heads // key_heads, size) * (size**-0.5 if scale is None else scale)
        of_prompt = self._by_row(self._by_prompt(queries) @ store.prompt_keys.transpose(2, 3))
        of_row = queries @ store.keys[:, :, : self._width].transpose(2, 3)
        if self._prompt_bias is not None:
            of_prompt = of_prompt + self._prompt_bias.to(queries.dtype)
        if not self._in_step:
            beyond = torch.arange(self._width, device=queries.device) >= self._lengths[:, None]
            of_row = of_row.masked_fill(beyond[:, None, None], float("-inf"))
        weights = torch.cat([of_prompt, of_row], dim=3).softmax(dim=3, dtype=torch.float32).to(queries.dtype)
        before, own = weights.split([of_prompt.shape[3], self._width], dim=3)
        output = own @ store.values[:, :, : self._width]
        output = output + self._by_row(self._by_prompt(before) @ store.prompt_values)
        return output.reshape(rows, 1, heads, -1)

    def _arrange(self) -> None:
        """How rows stand in a rectangle of prompts by rows a prompt, and which tokens of a prompt are padding."""
        assert self._prompt_mask is not None
        counts = self._owner.bincount(minlength=len(self._prompt_mask))
        self._widest = int(counts.max())
        self._full = bool((counts == self._widest).all())
        self._slot = self._owner * self._widest + torch.arange(len(self._owner), device=counts.device)
        self._slot = self._slot - (counts.cumsum(0) - counts)[self._owner]
        self._in_step = bool((self._lengths == self._lengths[:1]).all())
        self._width = int(self._lengths.max()) if len(self._lengths) else 0
        self._prompt_bias = None
        if not bool(self._prompt_mask.all()):
            bias = torch.zeros(self._prompt_mask.shape, device=counts.device)
            bias = bias.masked_fill(~self._prompt_mask, float("-inf"))
            self._prompt_bias = bias[self._owner][:, None, None]

    def _by_prompt(self, states: Float[Tensor, "rows heads group size"]) -> Float[Tensor, "prompts heads members size"]:
        """The rows of each prompt below each other, as one matrix a head."""
        assert self._prompt_mask is not None
        if not self._full:
            grid = states.new_zeros(len(self._prompt_mask) * self._widest, *states.shape[1:])
            states = grid.index_copy_(0, self._slot, states)
        return states.unflatten(0, (-1, self._widest)).transpose(1, 2).flatten(2, 3)

    def _by_row(self, states: Float[Tensor, "prompts heads members size"]) -> Float[Tensor, "rows heads group size"]:
        """Back from there."""
        rows = states.unflatten(2, (self._widest, -1)).transpose(1, 2).flatten(0, 1)
        return rows if self._full else rows.index_select(0, self._slot)


def _stack(first: States, second: States) -> States:
    """Both along the first axis, padded on the left to the same number of tokens."""
    if not len(first):
        return second
    width = max(first.shape[2], second.shape[2])
    return torch.cat([pad(states, (0, 0, width - states.shape[2], 0)) for states in (first, second)])
