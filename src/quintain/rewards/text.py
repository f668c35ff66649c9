"""Completions as plain text."""

from __future__ import annotations

from typing import Any

from quintain.types import PromptText


def completion_text(completion: PromptText) -> str:
    """The text of a completion: itself, or the contents of its chat messages, one a line.

    A message's content may be text, a list of parts (those of type "text" count), or None (0 characters).
    """
    if isinstance(completion, str):
        return completion
    return "\n".join(_content_text(message.get("content")) for message in completion)


def bare_word(word: str) -> str:
    """A word for comparison: lower case, without punctuation around it (a word of punctuation alone keeps it)."""
    return word.lower().strip(".,;:!?\"'()*") or word


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return content or ""
