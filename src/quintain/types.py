"""The records that travel through a step. All are frozen, and every tensor field states its shape.

Axes: `batch` (sampled sequences), `prompt` and `completion` (tokens), `prompts` (distinct prompts).
A mask is True where a token counts. Prompts are padded on the left, completions on the right; no code
outside the rollout engines compares ids with the pad or stop token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Unit = Literal["token", "sequence", "group"]
"""What a loss averages over, and what a split into mini-batches or micro-batches keeps whole."""

PromptText = str | list[dict[str, Any]]
"""A prompt or completion as reward functions see it: plain text, or a list of chat messages."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Nothing here is taken from a model's own generation defaults.

    `stop_token_ids` is the whole stop set (end-of-sequence included). A completion runs up to and including
    its first stop token, or the token that completes a stop string.
    """

    num_generations: int
    max_completion_length: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    min_completion_length: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts, each of which will be completed `num_generations` times."""

    token_ids: list[list[int]]
    prompts: list[PromptText]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Every other dataset column, one entry a prompt."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Samples:
    """What a rollout engine returns: row `i * num_generations + j` is completion j of prompt i.

    `logprobs` are of the sampled tokens under softmax(logits / temperature), in nats, before any truncation
    (top-k, top-p, min-p) or penalty, so that they can be compared with the trainer's own forward pass. They are 0
    where the mask is False, as are `values`: what the critic says before each token, where the engine was given one.
    """

    completion_ids: Int[Tensor, "batch completion"]
    completion_mask: Bool[Tensor, "batch completion"]
    stopped: Bool[Tensor, " batch"]
    logprobs: Float[Tensor, "batch completion"]
    values: Float[Tensor, "batch completion"] | None = None


@dataclass(frozen=True)
class RewardOutput:
    """Scores of one batch. A row that no function scored is absent (`scored` False), not zero."""

    rewards: Float[Tensor, " batch"]
    """Weighted total; 0 where not scored, so that it is always finite."""
    scored: Bool[Tensor, " batch"]
    components: dict[str, Float[Tensor, " batch"]]
    """Each function's unweighted numbers by name; NaN where it returned None."""
    token_rewards: Float[Tensor, "batch completion"] | None = None
    """Weighted intermediate rewards, for functions that return a list per completion; their sum is in `rewards` too."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers logged by reward functions through `log_metric`."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Columns logged by reward functions through `log_extra`, one entry a completion."""


@dataclass(frozen=True)
class PolicyOutputs:
    """One policy's view of a batch of completions. Positions outside the completion mask hold 0."""

    logprobs: Float[Tensor, "batch completion"]
    entropy: Float[Tensor, "batch completion"] = None
    """None where it was not asked for."""
    values: Float[Tensor, "batch completion"] | None = None
    exact_kl: Float[Tensor, "batch completion"] | None = None
    """KL(this policy || the reference) over the whole vocabulary; only with `kl_estimator="exact"`."""


@dataclass(frozen=True)
class LossTerm:
    """A part of the loss as a sum; the loop divides it by the number of its units in the whole mini-batch."""

    total: Float[Tensor, ""]
    unit: Unit


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch: its terms by name, and statistics as (sum, count) pairs to be averaged."""

    terms: dict[str, LossTerm]
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollouts:
    """Sampled completions and all that is known about them; each stage of a step returns a fuller copy.

    The first block comes from the engine, `rewards` and `scored` from the reward stage, the `*_logprobs` and `values`
    from the policies, and the last block from the algorithm's `estimate`. Each is None until its stage has run. An
    algorithm that needs another per-row tensor puts it in `signals`.
    """

    prompt_ids: Int[Tensor, "batch prompt"]
    prompt_mask: Bool[Tensor, "batch prompt"]
    completion_ids: Int[Tensor, "batch completion"]
    completion_mask: Bool[Tensor, "batch completion"]
    stopped: Bool[Tensor, " batch"]
    sampling_logprobs: Float[Tensor, "batch completion"]
    group_ids: Int[Tensor, " batch"]
    prompts: list[PromptText]
    completions: list[PromptText]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    on_policy: bool = True
    """Sampled by the online policy as it is now. Else `old_logprobs` are given, and ratios make up for it."""

    rewards: Float[Tensor, " batch"] = None
    scored: Bool[Tensor, " batch"] = None
    token_rewards: Float[Tensor, "batch completion"] = None
    reward_output: RewardOutput | None = None

    old_logprobs: Float[Tensor, "batch completion"] = None
    ref_logprobs: Float[Tensor, "batch completion"] = None
    target_logprobs: Float[Tensor, "batch completion"] = None
    reference_kl: Float[Tensor, "batch completion"] = None
    """Exact KL of the sampling policy to the reference; only where rewards need it and `kl_estimator="exact"`."""
    values: Float[Tensor, "batch completion"] = None

    advantages: Float[Tensor, "batch completion"] = None
    returns: Float[Tensor, "batch completion"] = None
    target_weights: Float[Tensor, " batch"] = None
    """TPO's target distribution over each group: sums to 1 over the group's scored rows."""
    signals: Mapping[str, Tensor] = field(default_factory=dict)
    """Further row-aligned tensors of an algorithm's own; the first axis is the batch."""
    excluded: Bool[Tensor, " batch"] = None
    """Rows kept out of the loss (cut-off completions under `mask_truncated_completions`)."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that `estimate` wants in the step's log."""

    def __len__(self) -> int:
        return int(self.completion_ids.shape[0])

    def replace(self, **changes: Any) -> Rollouts:
        """A copy with some fields changed; tensors must have one entry a row."""
        named = {**changes, **{f"signals[{name!r}]": value for name, value in changes.get("signals", {}).items()}}
        for name, value in named.items():
            if isinstance(value, Tensor) and (value.ndim == 0 or len(value) != len(self)):
                raise ValueError(
                    f"{name} must have one entry for each of the {len(self)} rows: got shape {tuple(value.shape)}."
                )
        return replace(self, **changes)

    @property
    def loss_mask(self) -> Bool[Tensor, "batch completion"]:
        """Tokens that take part in the loss: valid tokens of rows that were scored and not excluded."""
        mask = self.completion_mask
        if self.scored is not None:
            mask = mask & self.scored[:, None]
        if self.excluded is not None:
            mask = mask & ~self.excluded[:, None]
        return mask

    @property
    def loss_rows(self) -> Bool[Tensor, " batch"]:
        """Rows with at least one token in the loss."""
        return self.loss_mask.any(dim=1)

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Valid completion tokens of each row, the stop token included."""
        return self.completion_mask.sum(dim=1)

    def count(self, unit: Unit) -> int:
        """How many units take part in the loss: tokens, sequences with such a token, or groups with such a sequence."""
        if unit == "token":
            return int(self.loss_mask.sum())
        rows = self.loss_rows
        return int(rows.sum()) if unit == "sequence" else int(self.group_ids[rows].unique().numel())

    def select(self, rows: Sequence[int] | Tensor) -> Rollouts:
        """The given rows, in that order, with padding columns that no row needs trimmed away."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.completion_ids.device)
        order = index.tolist()
        prompt = _longest(self.prompt_mask[index])
        completion = _longest(self.completion_mask[index])

        def pick(value: Tensor) -> Tensor:
            return value[index]

        changes: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                value = pick(value)
                if item.name in ("prompt_ids", "prompt_mask"):
                    value = value[:, value.shape[1] - prompt :]
                elif value.ndim == 2 and value.shape[1] == self.completion_ids.shape[1]:
                    value = value[:, :completion]
            elif isinstance(value, list):
                value = [value[row] for row in order]
            changes[item.name] = value
        changes["columns"] = {name: [column[row] for row in order] for name, column in self.columns.items()}
        width = self.completion_ids.shape[1]
        changes["signals"] = {
            name: pick(value)[:, :completion] if value.ndim == 2 and value.shape[1] == width else pick(value)
            for name, value in self.signals.items()
        }
        changes["reward_output"] = None
        return Rollouts(**changes)

    def to(self, device: torch.device | str) -> Rollouts:
        """A copy with every tensor on `device`."""
        moved = {
            item.name: value.to(device)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), Tensor)
        }
        return replace(self, **moved, signals={name: value.to(device) for name, value in self.signals.items()})

    def minibatches(self, number: int, keep: Unit, generator: torch.Generator | None = None) -> Iterator[Rollouts]:
        """Deal the rows into `number` parts of nearly equal size, whole groups together when `keep` is "group".

        Sizes may differ by one unit. Rows are shuffled with `generator` when there is more than one part.
        """
        if number == 1:
            yield self
            return
        blocks = self._blocks(keep)
        order = torch.randperm(len(blocks), generator=generator).tolist()
        for part in range(number):
            # In their first order, in which completions of one prompt stand together and can share it.
            rows = sorted(row for position in order[part::number] for row in blocks[position])
            if rows:
                yield self.select(rows)

    def partition(self, max_tokens: int, keep: Unit, *, share_prompts: bool = False) -> list[list[int]]:
        """Row indices of micro-batches in which at most `max_tokens` tokens are computed, in row order.

        There are as few as can be, and they are about equally large, so that none takes more memory than it must. A
        single row, or a single group when `keep` is "group", that exceeds the budget goes alone.

        Args:
            share_prompts: a group's prompt counts once in a micro-batch, and nothing is padded. Else every row counts
                with its prompt, padded to the longest.
        """
        lengths = (self.group_ids, self.prompt_mask.sum(dim=1), self.lengths)
        spans = list(zip(*(numbers.tolist() for numbers in lengths)))
        blocks = [(block, [spans[row] for row in block]) for block in self._blocks(keep)]
        empty: _SharedSize | _PaddedSize = _SharedSize() if share_prompts else _PaddedSize()
        parts = _fill(blocks, max_tokens, empty)
        low, high = 0, max_tokens
        for _ in range(BALANCING_STEPS if len(parts) > 1 else 0):
            middle = (low + high) // 2
            tried = _fill(blocks, middle, empty)
            if len(tried) == len(parts):
                parts, high = tried, middle
            else:
                low = middle
        return parts

    def _blocks(self, keep: Unit) -> list[list[int]]:
        """Row indices of the smallest pieces a split may make, in order of first appearance."""
        if keep != "group":
            return [[row] for row in range(len(self))]
        blocks: dict[int, list[int]] = {}
        for row, group in enumerate(self.group_ids.tolist()):
            blocks.setdefault(group, []).append(row)
        return list(blocks.values())


BALANCING_STEPS = 6
"""Times that the budget's range is halved to find the smallest that needs no further micro-batch."""
Span = tuple[int, int, int]
"""Group, prompt tokens and completion tokens of a row."""


@dataclass(frozen=True)
class _PaddedSize:
    """Of a micro-batch whose rows have their own prompts, padded to the longest prompt and completion."""

    rows: int = 0
    prompt: int = 0
    completion: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt + self.completion)

    def with_rows(self, rows: Sequence[Span]) -> _PaddedSize:
        return _PaddedSize(
            self.rows + len(rows),
            max(self.prompt, *(prompt for _, prompt, _ in rows)),
            max(self.completion, *(completion for _, _, completion in rows)),
        )


@dataclass(frozen=True)
class _SharedSize:
    """Of a micro-batch in which the rows of a group, as long as they follow each other, share its prompt."""

    tokens: int = 0
    group: int | None = None

    def with_rows(self, rows: Sequence[Span]) -> _SharedSize:
        tokens, group = self.tokens, self.group
        for new, prompt, completion in rows:
            tokens += completion + (prompt if new != group else 0)
            group = new
        return _SharedSize(tokens, group)


def _fill(
    blocks: Sequence[tuple[list[int], list[Span]]], max_tokens: int, empty: _SharedSize | _PaddedSize
) -> list[list[int]]:
    """The blocks' rows in micro-batches, each filled until the next block does not fit."""
    parts: list[list[int]] = []
    size = empty
    for rows, spans in blocks:
        if not parts or size.with_rows(spans).tokens > max_tokens:
            parts.append([])
            size = empty
        parts[-1] += rows
        size = size.with_rows(spans)
    return parts


def _longest(mask: Bool[Tensor, "batch tokens"]) -> int:
    """The largest number of True entries in a row, at least 1 so that no tensor is left without columns."""
    return max(1, int(mask.sum(dim=1).max())) if mask.numel() else 1
