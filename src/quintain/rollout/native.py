"""The native engine: batched sampling through the model's own modules.

Each distinct prompt is read once and shared by the rows that continue it. Rows that have ended leave the batch, and
waiting prompts take their place.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from quintain.adapters import unwrapped
from quintain.attention import adopt, as_mask, longest_unwindowed
from quintain.errors import ConfigError
from quintain.matmul import packed_linears, packs_half, use_fast_linears
from quintain.rollout.cache import GroupCache, preallocated_cache
from quintain.rollout.checks import check_prompts, validate_sampling
from quintain.rollout.completions import Completions, left_pad, sampling_mode
from quintain.types import Samples, SamplingParams

COMPACT_FRACTION = 1 / 8
"""Part of the batch that must have ended before the rest is moved together: moving copies the whole cache."""
CACHE_BYTES = 2 * 2**30
"""Keys and values of completions that are kept at once; further prompts wait for their turn."""
PROBE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
"""Largest difference of logits, relative to the largest logit, that rounding explains; 0.05 in half precision."""

_log = logging.getLogger(__name__)

Critic = Callable[[Float[Tensor, "rows width"]], Float[Tensor, " rows"]]
Said = tuple[Float[Tensor, "rows vocab"], Float[Tensor, " rows"] | None]
"""Logits of each row's next token, and the critic's value before it, where there is a critic."""


class NativeEngine:
    """Samples from any transformers decoder that keeps its past in the standard key-value cache.

    Args:
        model: a causal language model, PEFT-wrapped or not; the engine reads its weights as they are at each call. Its
            attention and its linear layers may be computed by other functions from here on, with the same results; see
            `attention.py` and `matmul.py`.
        tokenizer: needed only for stop strings.
        dtype: of the matrix products; None is that of the weights. In bfloat16 the tokens are drawn from a policy that
            is rounded, and their log-probabilities are of that one.
        cache_bytes: bound on the keys and values of the completions in the batch; at least one prompt's group is.
    Attributes:
        critic: from the hidden states that enter the output layer, `[rows, width]`, to one value a row. Where it is
            set, the values before each token are recorded as it is drawn, so that no pass over the completions is
            needed for them.
    Raises:
        ConfigError: the model keeps its past in some other way; the message says which.
    """

    name = "native"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if reason := unsupported_by_native(model):
            raise ConfigError(f"the native rollout engine cannot run this model: {reason}. Use 'transformers'.")
        self.model = model
        self.tokenizer = tokenizer
        self.dtype, self.cache_bytes = dtype, cache_bytes
        self.critic: Critic | None = None
        use_fast_linears(model)
        self._longest_shared = longest_unwindowed(model) if adopt(model) and _groups_agree(model) else 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, generator: torch.Generator
    ) -> Samples:
        """Sample `num_generations` completions of each prompt."""
        validate_sampling(sampling)
        check_prompts(prompts, sampling, self.model)
        device = _input_device(self.model)
        completions = Completions(prompts, sampling, generator, self.tokenizer, device)
        with sampling_mode(self.model), self._precision(device):
            self._write(completions, prompts, sampling, device)
        return completions.samples()

    def _precision(self, device: torch.device) -> AbstractContextManager[None]:
        if self.dtype is None or (device.type == "cpu" and packs_half()):
            return packed_linears(self.model, self.dtype)
        return torch.autocast(device.type, self.dtype)

    def _write(
        self,
        completions: Completions,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        device: torch.device,
    ) -> None:
        """Decode until every row has ended."""
        decoder = self._decoder(max(map(len, prompts)), sampling, device)
        most = self._most_rows(sampling)
        waiting = _requests(prompts, sampling.num_generations, most)
        rows = tokens = torch.empty(0, dtype=torch.long, device=device)
        while True:
            joining = []
            if decoder.takes_more or not len(rows):
                room = most - len(rows)
                while waiting and len(waiting[0][1]) <= room:
                    joining.append(waiting.popleft())
                    room -= len(joining[-1][1])
            if joining:
                new_rows = torch.tensor([row for _, new in joining for row in new], device=device)
                logits, values = decoder.join([prompt for prompt, _ in joining], [len(new) for _, new in joining])
                tokens = torch.cat([tokens, completions.append(logits, new_rows, values)])
                rows = torch.cat([rows, new_rows])
            running = (~completions.ended[rows]).nonzero().squeeze(1)
            if not len(running):
                if not waiting:
                    return
                decoder = self._decoder(max(map(len, prompts)), sampling, device)
                rows, tokens = rows[running], tokens[running]
                continue
            if len(rows) - len(running) >= COMPACT_FRACTION * len(rows):
                decoder.select(running)
                rows, tokens = rows[running], tokens[running]
            logits, values = decoder.step(tokens)
            tokens = completions.append(logits, rows, values)

    def _decoder(self, longest_prompt: int, sampling: SamplingParams, device: torch.device) -> _Decoder:
        longest = longest_prompt + sampling.max_completion_length
        kind = _GroupDecoder if longest <= self._longest_shared else _PaddedDecoder
        return kind(_Forward(self.model, self.critic), sampling, device)

    def _most_rows(self, sampling: SamplingParams) -> int:
        """Rows whose keys and values fit into `cache_bytes`, and one prompt's at least."""
        config = unwrapped(self.model).config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * heads * size * next(self.model.parameters()).element_size()
        return max(sampling.num_generations, self.cache_bytes // (token * sampling.max_completion_length))


def _requests(
    prompts: Sequence[Sequence[int]], num_generations: int, most: int
) -> deque[tuple[tuple[int, ...], list[int]]]:
    """Each distinct prompt with the rows that continue it, at most `most` of them."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        first = index * num_generations
        rows.setdefault(tuple(prompt), []).extend(range(first, first + num_generations))
    return deque(
        (prompt, members[start : start + most])
        for prompt, members in rows.items()
        for start in range(0, len(members), most)
    )


class _Decoder(Protocol):
    """The rows in the batch as the model sees them."""

    takes_more: bool
    """Whether prompts can join rows that are being written."""

    def join(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> Said:
        """Read prompts and put so many rows behind each; returns what is said of the new rows' first tokens."""
        ...

    def step(self, tokens: Int[Tensor, " rows"]) -> Said:
        """Feed each row its last token; returns what is said of the one after it."""
        ...

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the given rows, in ascending order."""
        ...


class _GroupDecoder:
    """Rows attend to their prompt's keys and values, which exist once, and to their own."""

    takes_more = True

    def __init__(self, forward: _Forward, sampling: SamplingParams, device: torch.device) -> None:
        self._forward = forward
        self._device, self._pad = device, sampling.pad_token_id
        # The last token of a completion is never fed back.
        self._cache = GroupCache(max(1, sampling.max_completion_length - 1))
        self._mask = as_mask(self._cache, device)
        self._positions = torch.empty(0, dtype=torch.long, device=device)

    def join(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> Said:
        ids, mask = left_pad(prompts, self._pad, self._device)
        read = DynamicCache()
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        said = self._forward(ids, positions, mask.long(), read)
        counts = torch.tensor(rows, device=self._device)
        self._cache.join(read, mask, rows)
        self._positions = torch.cat([self._positions, mask.sum(dim=1).repeat_interleave(counts)])
        return _rows_of(said, torch.arange(len(prompts), device=self._device).repeat_interleave(counts))

    def step(self, tokens: Int[Tensor, " rows"]) -> Said:
        self._cache.advance()
        said = self._forward(tokens[:, None], self._positions[:, None], self._mask, self._cache)
        self._positions = self._positions + 1
        return said

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self._cache.select(rows)
        self._positions = self._positions[rows]


class _PaddedDecoder:
    """Every row has its own copy of its prompt, padded on the left: the plain reference, for any attention."""

    takes_more = False

    def __init__(self, forward: _Forward, sampling: SamplingParams, device: torch.device) -> None:
        self._forward = forward
        self._device, self._pad = device, sampling.pad_token_id
        # The last token of a completion is never fed back.
        self._room = sampling.max_completion_length - 1

    def join(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> Said:
        ids, mask = left_pad(prompts, self._pad, self._device)
        self._length = mask.shape[1]
        self._cache = preallocated_cache(self._length + self._room)
        self._mask = nn.functional.pad(mask.long(), (0, self._room), value=1)
        self._positions = mask.sum(dim=1)
        counted = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        said = self._forward(ids, counted, self._mask[:, : self._length], self._cache)
        sources = torch.arange(len(prompts), device=self._device)
        sources = sources.repeat_interleave(torch.tensor(rows, device=self._device))
        self.select(sources)
        return _rows_of(said, sources)

    def step(self, tokens: Int[Tensor, " rows"]) -> Said:
        self._length += 1
        said = self._forward(tokens[:, None], self._positions[:, None], self._mask[:, : self._length], self._cache)
        self._positions = self._positions + 1
        return said

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]


class _Forward:
    """The model's forward pass, by the names that its arguments have; says what it makes of the last position."""

    def __init__(self, model: nn.Module, critic: Critic | None = None) -> None:
        self._model, self._critic = model, critic
        accepted = _forward_arguments(model)
        self._cache_name = _cache_argument(accepted)
        self._takes_positions = "position_ids" in accepted
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def __call__(self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Said:
        arguments = {"input_ids": token_ids, "attention_mask": mask, "use_cache": True, self._cache_name: cache}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._critic is None:
            return self._model(**arguments, **self._options).logits[:, -1], None
        states: list[Tensor] = []
        head = unwrapped(self._model).get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _head, inputs: states.append(inputs[0][:, -1]))
        try:
            logits = self._model(**arguments, **self._options).logits[:, -1]
        finally:
            handle.remove()
        return logits, self._critic(states[0]).float()


def _rows_of(said: Said, sources: Int[Tensor, " rows"]) -> Said:
    logits, values = said
    return logits[sources], None if values is None else values[sources]


def _groups_agree(model: nn.Module) -> bool:
    """Whether the model attends by a plan and gives the same logits so: measured, on two prompts of unequal length."""
    device = _input_device(model)
    sampling = SamplingParams(num_generations=2, max_completion_length=3, stop_token_ids=(), pad_token_id=0)
    limit = getattr(unwrapped(model).config.get_text_config(), "max_position_embeddings", None) or 8
    long = int(max(1, min(5, limit - 3, longest_unwindowed(model) - 3)))
    prompts, rows = [list(range(1, long + 1)), [1]], [2, 1]
    tokens = torch.tensor([1, 2, 0], device=device)
    results = []
    with sampling_mode(model):
        for kind in (_PaddedDecoder, _GroupDecoder):
            decoder = kind(_Forward(model), sampling, device)
            try:
                logits = [decoder.join(prompts, rows)[0], decoder.step(tokens)[0], decoder.step(tokens)[0]]
            except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
                _log.info("sampling keeps a copy of the prompt for every row: the model refused the plan (%s)", error)
                return False
            results.append(torch.cat(logits))
    plain, shared = results
    rounding = PROBE_TOLERANCE.get(plain.dtype, 0.05) * max(1.0, float(plain.abs().max()))
    difference = float((plain - shared).abs().max())
    if not difference <= rounding:
        _log.info("sampling keeps a copy of the prompt for every row: logits would differ by %.3g", difference)
    return difference <= rounding


def unsupported_by_native(model: nn.Module) -> str | None:
    """Why the native engine cannot run `model`, as a clause, or None if it can."""
    base = unwrapped(model)
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return "its adapter puts virtual tokens in front of the prompt"
    if base.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(base, "_is_stateful", False):
        return "its layers keep a recurrent state, not keys and values"
    if _cache_argument(_forward_arguments(base)) is None:
        return f"{type(base).__name__}.forward takes no cache"
    if any(hasattr(parameter, "ds_id") or hasattr(parameter, "device_mesh") for parameter in base.parameters()):
        return "its parameters are sharded, so all processes must decode in step"
    config = base.config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "attention_chunk_size", None
    ):
        return "it attends in chunks"
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    if others := layers - {DynamicLayer, DynamicSlidingWindowLayer}:
        return "its cache needs layers of type " + ", ".join(sorted(layer.__name__ for layer in others))
    return None


def _forward_arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(unwrapped(model).forward).parameters)


def _cache_argument(accepted: set[str]) -> Any:
    """What the model calls its cache: transformers renamed `past_key_values` to `cache` within version 5."""
    return next((name for name in ("cache", "past_key_values") if name in accepted), None)


def _input_device(model: Any) -> torch.device:
    return model.get_input_embeddings().weight.device
