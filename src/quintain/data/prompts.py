"""From dataset rows to prompts: checks, chat template, tokens, and what happens to prompts that are too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateError

from quintain.errors import DataError
from quintain.types import Prompts, PromptText

OverlongPrompts = Literal["error", "drop", "cut_left"]
Outcome = Literal["kept", "cut", "dropped"]


@dataclass(frozen=True)
class EncodedPrompt:
    """One row as a prompt. A cut shortens `token_ids` alone: `prompt` is whole, and `length` counts all its tokens."""

    prompt: PromptText
    token_ids: list[int]
    length: int
    outcome: Outcome
    columns: dict[str, Any]


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts.

    Args:
        tokenizer: turns text into tokens; its chat template is needed for chat prompts only.
        max_prompt_length: most tokens of a prompt, at least 1; None sets no limit.
        overlong_prompts: for longer ones: "error", "drop" (leave the row out), or "cut_left" (keep the last tokens).
        chat_template_kwargs: further variables for the chat template.
        system_prompt: a system message put before every chat prompt that has none; text prompts become the user
            message after it.
    """

    tokenizer: Any
    max_prompt_length: int | None = None
    overlong_prompts: OverlongPrompts = "error"
    chat_template_kwargs: Mapping[str, Any] | None = None
    system_prompt: str | None = None

    def encode(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> list[EncodedPrompt]:
        """Rows with a "prompt", as prompts.

        Text prompts get the special tokens that the tokenizer puts at the start, once; those that it would put at the
        end are left off, since a completion follows. Chat prompts are rendered with the template, which asks for the
        assistant's turn, or continues it where the last message is the assistant's.

        Args:
            rows: from a dataset.
            indices: the rows' numbers, for errors.
        Raises:
            DataError: a row without usable prompt, or one that is too long where `overlong_prompts` is "error".
        """
        prompts = [self._with_system_prompt(read_prompt(row, index)) for row, index in zip(rows, indices)]
        token_ids = self._tokenize(prompts, indices)
        return [
            self._fit(prompt, ids, {name: value for name, value in row.items() if name != "prompt"}, index)
            for prompt, ids, row, index in zip(prompts, token_ids, rows, indices)
        ]

    def _with_system_prompt(self, prompt: PromptText) -> PromptText:
        if self.system_prompt is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _tokenize(self, prompts: Sequence[PromptText], indices: Sequence[int]) -> list[list[int]]:
        kinds = {type(prompt) for prompt in prompts}
        if kinds == {str, list}:
            first = {kind: next(i for p, i in zip(prompts, indices) if isinstance(p, kind)) for kind in (str, list)}
            raise DataError(
                f"The dataset mixes text prompts (row {first[str]}) and chat prompts (row {first[list]}). "
                f"Make them all text, or all lists of messages."
            )
        if not prompts:
            return []
        if kinds == {str}:
            return [self._strip_special_tokens(ids) for ids in self.tokenizer(list(prompts))["input_ids"]]
        texts = [self._render(prompt, index) for prompt, index in zip(prompts, indices)]
        # The template has written the special tokens already.
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids

    def _strip_special_tokens(self, ids: list[int]) -> list[int]:
        """Without a second start token (the text may begin with one) and without an end-of-sequence token put last."""
        start, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if start is not None and ids[:2] == [start, start]:
            ids = ids[1:]
        if end is not None and self._adds_end_token and ids[-1:] == [end]:
            ids = ids[:-1]
        return ids

    @cached_property
    def _adds_end_token(self) -> bool:
        ids: list[int] = self.tokenizer("a")["input_ids"]
        return ids[-1:] == [self.tokenizer.eos_token_id]

    def _render(self, messages: PromptText, index: int) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"Row {index} is a chat prompt, and the tokenizer of {self.tokenizer.name_or_path!r} has no chat "
                f"template. Either pass a tokenizer that has one as processing_class (a chat model's, or set its "
                f'chat_template), or give the "prompt" column as plain text.'
            )
        continues = messages[-1]["role"] == "assistant"  # type: ignore[index]
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **(self.chat_template_kwargs or {}),
            )
        except (TemplateError, ValueError) as error:
            raise DataError(
                f"Row {index}: the chat template of {self.tokenizer.name_or_path!r} refused the messages: {error}"
            ) from error
        return text

    def _fit(self, prompt: PromptText, ids: list[int], columns: dict[str, Any], index: int) -> EncodedPrompt:
        limit = self.max_prompt_length
        if not ids:
            raise DataError(f"Row {index}: the prompt {prompt!r:.60} has no tokens. Remove the row.")
        if limit is None or len(ids) <= limit:
            return EncodedPrompt(prompt, ids, len(ids), "kept", columns)
        if self.overlong_prompts == "error":
            raise DataError(
                f"Row {index}: the prompt has {len(ids)} tokens, more than max_prompt_length={limit}. "
                f'Raise max_prompt_length to {len(ids)}, or set overlong_prompts to "drop" (leave such rows out) '
                f'or "cut_left" (keep their last {limit} tokens).'
            )
        if self.overlong_prompts == "drop":
            return EncodedPrompt(prompt, ids, len(ids), "dropped", columns)
        return EncodedPrompt(prompt, ids[-limit:], len(ids), "cut", columns)


def read_prompt(row: Mapping[str, Any], index: int) -> PromptText:
    """The checked prompt of a row: text, or a list of messages with `role` and `content`, without None entries.

    Raises:
        DataError: no prompt, an empty one, or one of another type.
    """
    if "prompt" not in row:
        raise DataError(missing_prompt_column(list(row)))
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"Row {index}: the prompt is empty. Remove the row, or write its prompt.")
        return prompt
    if not isinstance(prompt, list):
        raise DataError(
            f"Row {index}: the prompt must be text or a list of messages, got {type(prompt).__name__}: {prompt!r:.60}."
        )
    if not prompt:
        raise DataError(f"Row {index}: the prompt has no messages. Remove the row, or write its prompt.")
    return [_read_message(message, index) for message in prompt]


def _read_message(message: Any, index: int) -> dict[str, Any]:
    """A message without the None entries that a dataset fills in where messages differ in their keys."""
    example = '{"role": "user", "content": "..."}'
    if not isinstance(message, Mapping):
        raise DataError(f"Row {index}: a message must look like {example}, got {message!r:.60}.")
    kept = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if not isinstance(kept.get(key), str):
            raise DataError(f"Row {index}: the {key} of a message must be text, as in {example}: got {message!r:.80}.")
    return kept


def missing_prompt_column(columns: Sequence[str]) -> str:
    """What to say about a dataset without prompts."""
    usual = ("question", "problem", "query", "instruction", "input", "messages", "text")
    source = next((name for name in usual if name in columns), columns[0] if columns else "NAME")
    return (
        f'The dataset has no column "prompt". It has: {", ".join(columns) or "none"}. '
        f"Rename the one that holds the prompts, as text or chat messages: dataset_columns: {{{source}: prompt}} in a "
        f"recipe, dataset.rename_column({source!r}, 'prompt') in Python"
    )


def collect_prompts(encoded: Sequence[EncodedPrompt]) -> Prompts:
    """Encoded prompts as the record that a step starts from; a column that a row lacks holds None there."""
    names = dict.fromkeys(name for item in encoded for name in item.columns)
    return Prompts(
        token_ids=[item.token_ids for item in encoded],
        prompts=[item.prompt for item in encoded],
        columns={name: [item.columns.get(name) for item in encoded] for name in names},
    )
