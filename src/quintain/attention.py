"""Attention by a plan: who attends to whom, computed without a mask of all pairs.

transformers hands a model's queries, keys and values to a function chosen by name. `adopt` makes a model use the one
in here. It is PyTorch's own attention, as before, unless the attention mask is one that `as_mask` made from a plan;
then the plan computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quintain.adapters import unwrapped

IMPLEMENTATION = "quintain"
FEW_PAIRS = 2**17
"""Pairs of tokens, padding included, below which a second call costs more than the padding it saves."""


BLOCK = 64
"""Queries computed together: the keys behind the last of them, which none of them sees, are left out."""


class AttentionPlan(Protocol):
    """Computes one attention layer's output."""

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "batch heads tokens head_size"],
        keys: Float[Tensor, "batch key_heads tokens head_size"],
        values: Float[Tensor, "batch key_heads tokens value_size"],
        scale: float | None,
    ) -> Float[Tensor, "batch tokens heads value_size"]: ...


def as_mask(plan: AttentionPlan, device: torch.device | str = "cpu") -> Tensor:
    """The plan in a form that a transformers model passes on as its attention mask.

    It has four axes, which models take as they are, and no entries, with which no other attention function can compute
    anything, so that a model that ignores the plan fails and cannot go on with a wrong mask.
    """
    mask = torch.ones(1, 1, 0, 0, dtype=torch.bool, device=device)
    mask.plan = plan  # type: ignore[attr-defined]
    return mask


def adopt(model: nn.Module) -> bool:
    """Let the model compute attention by plans; False, and nothing changed, if it does not choose it by name.

    Its own attention must be PyTorch's ("sdpa"), the default. What the model computes for everyone else stays the same.
    """
    base = unwrapped(model)
    config = base.config
    if config._attn_implementation == IMPLEMENTATION:
        return True
    if config._attn_implementation != "sdpa" or not base._can_set_attn_implementation():
        return False
    base.set_attn_implementation(IMPLEMENTATION)
    return config._attn_implementation == IMPLEMENTATION


def longest_unwindowed(model: nn.Module) -> float:
    """Tokens up to which every token sees all earlier ones; beyond it a sliding window or a chunk forgets some."""
    config = unwrapped(model).config.get_text_config(decoder=True)
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((int(limit) for limit in limits if limit), default=float("inf"))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    plan: AttentionPlan | None = getattr(attention_mask, "plan", None)
    if plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"attention with {name} is not computed by a plan")
    if dropout:
        raise ValueError("attention with dropout is not computed by a plan")
    return plan.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


class SharedPrompts:
    """Sequences laid out one after the other on one axis, the completions of a prompt sharing its tokens.

    Every token attends to the earlier tokens of its own completion and of its prompt. Sequences of about the same
    length are computed together, so that there is little padding; the plain reference is a copy of the prompt in front
    of every completion.

    Args:
        prompts: first position and length of each prompt.
        completions: first position, length and prompt (its index above) of each completion; lengths may be 0.
    """

    def __init__(self, prompts: Sequence[tuple[int, int]], completions: Sequence[tuple[int, int, int]]) -> None:
        self._parts: list[_Part] = []
        places: list[Tensor] = []  # of each computed row, the position it belongs to; -1 for padding
        for members in _alike([(length,) for _, length in prompts]):
            part = _PromptPart([prompts[index] for index in members])
            self._parts.append(part)
            places.append(part.places)
        for members in _alike([(prompts[prompt][1], length) for _, length, prompt in completions]):
            chosen = [completions[index] for index in members]
            completion_part = _CompletionPart(
                [(start, length) for start, length, _ in chosen], [prompts[prompt] for *_, prompt in chosen]
            )
            self._parts.append(completion_part)
            places.append(completion_part.places)
        rows = torch.cat([part.flatten() for part in places])
        taken = (rows >= 0).nonzero().squeeze(1)
        self._row_of = torch.empty(len(taken), dtype=torch.long)
        self._row_of[rows[taken]] = taken

    def to(self, device: torch.device) -> SharedPrompts:
        """Move the plan's index tensors (in place)."""
        self._row_of = self._row_of.to(device)
        for part in self._parts:
            part.to(device)
        return self

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Attention over the whole axis; the batch is of size 1."""
        flat = [states[0].transpose(0, 1) for states in (queries, keys, values)]  # [tokens, heads, head_size]
        query, key, value = flat
        outputs = [part.attend(query, key, value, scale).flatten(0, 1) for part in self._parts]
        return torch.cat(outputs).index_select(0, self._row_of)[None]


class _Part(ABC):
    """Sequences of about the same length, padded to one rectangle."""

    places: Int[Tensor, "sequences tokens"]
    """Position of each token; -1 for padding."""

    def to(self, device: torch.device) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    @abstractmethod
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """From states `[tokens, heads, head_size]` to outputs `[sequences, tokens, heads, head_size]`."""


class _PromptPart(_Part):
    """Prompts: each token sees itself and what is before it. Padding comes last, so that no token sees it."""

    def __init__(self, prompts: Sequence[tuple[int, int]]) -> None:
        self.places = _places(prompts)
        self._read = self.places.clamp(min=0)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        query, key, value = (_take(states, self._read).transpose(1, 2) for states in (queries, keys, values))
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)


class _CompletionPart(_Part):
    """Completions: each token sees its prompt, itself and what is before it in its completion."""

    def __init__(self, completions: Sequence[tuple[int, int]], prompts: Sequence[tuple[int, int]]) -> None:
        own, before = _places(completions), _places(prompts)
        self.places = own
        self._read = own.clamp(min=0)
        self._read_keys = torch.cat([before, own], dim=1).clamp(min=0)
        tokens = own.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        of_prompt = (before >= 0)[:, None].expand(-1, tokens, -1)
        self._seen = torch.cat([of_prompt, causal.expand(len(own), -1, -1)], dim=2)
        self._blocks = [slice(start, min(start + BLOCK, tokens)) for start in range(0, tokens, BLOCK)]
        self._prompt_width = before.shape[1]
        self._masks: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._masks.clear()

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        heads, key_heads = queries.shape[1], keys.shape[1]
        # The query heads that share a key head stand below each other as further queries, so that no key is repeated.
        query = _take(queries, self._read).unflatten(2, (key_heads, -1)).permute(0, 2, 3, 1, 4)
        key, value = (_take(states, self._read_keys).transpose(1, 2) for states in (keys, values))
        outputs = []
        for block, mask in zip(self._blocks, self._block_masks(query.dtype, heads // key_heads)):
            last = self._prompt_width + block.stop
            output = scaled_dot_product_attention(
                query[:, :, :, block].flatten(2, 3), key[:, :, :last], value[:, :, :last], attn_mask=mask, scale=scale
            )
            outputs.append(output.unflatten(2, (heads // key_heads, -1)))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
        return output.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _block_masks(self, dtype: torch.dtype, repeats: int) -> list[Tensor]:
        """For each block of queries: 0 where a key is seen and -inf elsewhere; made once for all layers."""
        if (dtype, repeats) not in self._masks:
            masks = []
            for block in self._blocks:
                seen = self._seen[:, block, : self._prompt_width + block.stop]
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))
                masks.append(mask[:, None].repeat(1, 1, repeats, 1))
            self._masks[dtype, repeats] = masks
        return self._masks[dtype, repeats]


def _take(states: Tensor, index: Tensor) -> Tensor:
    """`[tokens, heads, size]` at an index `[sequences, length]`; the backward pass adds in a fixed order."""
    return states.flatten(1).index_select(0, index.flatten()).view(*index.shape, *states.shape[1:])


def _places(spans: Sequence[tuple[int, int]]) -> Int[Tensor, "sequences tokens"]:
    """Positions of each span `(start, length)`, padded at the end with -1."""
    starts, lengths = (torch.tensor(part, dtype=torch.long)[:, None] for part in zip(*spans))
    offsets = torch.arange(int(lengths.max()))[None]
    return torch.where(offsets < lengths, starts + offsets, -1)


def _alike(sizes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Indices of sequences to compute together, by the lengths of what they read; those of length 0 are left out.

    All of them where padding costs little; else those whose lengths lie between the same powers of two.
    """
    kept = [index for index, numbers in enumerate(sizes) if numbers[-1]]
    longest = [max((sizes[index][axis] for index in kept), default=0) for axis in range(len(sizes[0]))] if sizes else []
    if kept and len(kept) * longest[-1] * sum(longest) <= FEW_PAIRS:
        return [kept]
    classes: dict[tuple[int, ...], list[int]] = {}
    for index in kept:
        classes.setdefault(tuple(number.bit_length() for number in sizes[index]), []).append(index)
    return list(classes.values())
