"""From an engine's samples, or from tokens that came from elsewhere, to the record that the step works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quintain.errors import RolloutError
from quintain.masking import valid_ids
from quintain.rollout.completions import left_pad
from quintain.rollout.stopping import completion_mask
from quintain.types import Prompts, PromptText, Rollouts, Samples


def build_rollouts(prompts: Prompts, samples: Samples, tokenizer: Any, num_generations: int) -> Rollouts:
    """Join prompts and their completions: prompt i's are rows `i * num_generations` onwards, and its group id is i.

    A completion is text where the prompt is text, and a list with one assistant message where it is a chat.
    """
    rows = len(samples.completion_ids)
    if rows != len(prompts) * num_generations:
        raise RolloutError(
            f"the engine returned {rows} completions for {len(prompts)} prompts with "
            f"num_generations={num_generations}; expected {len(prompts) * num_generations}."
        )
    source = [row // num_generations for row in range(rows)]
    device = samples.completion_ids.device
    prompt_ids, prompt_mask = left_pad([prompts.token_ids[index] for index in source], _pad_token_id(tokenizer), device)
    texts = [prompts.prompts[index] for index in source]
    return Rollouts(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=samples.completion_ids,
        completion_mask=samples.completion_mask,
        stopped=samples.stopped,
        sampling_logprobs=samples.logprobs,
        values=samples.values,
        group_ids=torch.tensor(source, dtype=torch.long, device=device),
        prompts=texts,
        completions=_completion_texts(texts, samples, tokenizer),
        columns={name: [column[index] for index in source] for name, column in prompts.columns.items()},
    )


def rollouts_from_tokens(
    queries: Sequence[Sequence[int] | Tensor],
    responses: Sequence[Sequence[int] | Tensor],
    tokenizer: Any,
    *,
    stop_token_ids: Sequence[int],
    sampling_logprobs: Sequence[Sequence[float] | Tensor] | None = None,
    prompts: Sequence[PromptText] | None = None,
    columns: Mapping[str, list[Any]] | None = None,
) -> Rollouts:
    """The manual way in: token ids of prompts and completions, one of each a row, of any lengths, unpadded.

    A completion counts up to and including its first stop token. Rows with the same prompt form a group.

    Args:
        sampling_logprobs: of every token of every response; where it is not given, the record holds NaN, "not known".
        prompts: as reward functions should see them; by default the decoded queries.
        columns: further columns, one entry a row.
    Raises:
        RolloutError: the lists are of different lengths, or a row is empty.
    """
    queries, responses = _as_lists(queries), _as_lists(responses)
    _check_rows(queries, responses, sampling_logprobs, {"prompts": prompts, **(columns or {})})
    texts: list[PromptText] = [_decode(tokenizer, query) for query in queries] if prompts is None else list(prompts)
    pad_token_id = _pad_token_id(tokenizer)
    lengths = [len(response) for response in responses]
    # Completions are padded on the right: flip, pad on the left, flip back.
    flipped, _ = left_pad([response[::-1] for response in responses], pad_token_id)
    completion_ids = flipped.flip(1)
    mask, stopped = completion_mask(completion_ids, stop_token_ids, torch.tensor(lengths))
    samples = Samples(completion_ids, mask, stopped, _padded_logprobs(sampling_logprobs, mask))
    prompt_ids, prompt_mask = left_pad(queries, pad_token_id)
    group = {query: index for index, query in enumerate(dict.fromkeys(tuple(query) for query in queries))}
    return Rollouts(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=mask,
        stopped=stopped,
        sampling_logprobs=samples.logprobs,
        group_ids=torch.tensor([group[tuple(query)] for query in queries], dtype=torch.long),
        prompts=texts,
        completions=_completion_texts(texts, samples, tokenizer),
        columns={name: list(column) for name, column in (columns or {}).items()},
    )


def _completion_texts(prompts: Sequence[PromptText], samples: Samples, tokenizer: Any) -> list[PromptText]:
    """Decode each row's valid tokens, in the form that its prompt has."""
    rows = [tuple(ids) for ids in valid_ids(samples.completion_ids, samples.completion_mask)]
    texts = {ids: _decode(tokenizer, list(ids)) for ids in dict.fromkeys(rows)}
    return [
        texts[ids] if isinstance(prompt, str) else [{"role": "assistant", "content": texts[ids]}]
        for prompt, ids in zip(prompts, rows, strict=True)
    ]


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _pad_token_id(tokenizer: Any) -> int:
    """What to fill the record's masked positions with. Nothing reads them, so a tokenizer without one gets 0."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


def _as_lists(sequences: Sequence[Sequence[int] | Tensor]) -> list[list[int]]:
    return [sequence.tolist() if isinstance(sequence, Tensor) else list(sequence) for sequence in sequences]


def _padded_logprobs(
    logprobs: Sequence[Sequence[float] | Tensor] | None, mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, "batch completion"]:
    """Ragged log-probabilities as a tensor that is 0 outside the mask, and NaN inside it where there are none."""
    padded = torch.full(mask.shape, torch.nan)
    for row, values in enumerate(logprobs or ()):
        padded[row, : len(values)] = torch.as_tensor(values, dtype=torch.float32)
    return torch.where(mask, padded, 0.0)


def _check_rows(
    queries: list[list[int]],
    responses: list[list[int]],
    logprobs: Sequence[Sequence[float] | Tensor] | None,
    others: Mapping[str, Sequence[Any] | None],
) -> None:
    """Every list has one entry a row, and no row is empty."""
    lists = {"responses": responses, "sampling_logprobs": logprobs, **others}
    for name, values in lists.items():
        if values is not None and len(values) != len(queries):
            raise RolloutError(f"expected one entry of {name} for each of {len(queries)} queries: got {len(values)}.")
    if not queries:
        raise RolloutError("expected at least one query and its response: got none.")
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        if not query or not response:
            raise RolloutError(f"row {row} has an empty {'response' if query else 'query'}: give at least one token.")
        if logprobs is not None and len(logprobs[row]) != len(response):
            raise RolloutError(
                f"row {row} has {len(response)} response tokens but {len(logprobs[row])} sampling_logprobs."
            )
