"""Built-in rewards that need nothing but the text. Each is a factory: settings in, a reward function out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from quintain.errors import ConfigError, nearest
from quintain.rewards.text import bare_word, completion_text
from quintain.types import PromptText

Scorer = Callable[..., list[float | None]]
"""A reward function as built-ins make it: called by keyword, one number a completion, None for "not scored"."""

NUMBER = re.compile(
    r"(?:(?<![\w)])-)?"  # a sign, not the minus of "5-3"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d+)?"
)


def named(name: str, *columns: str) -> Callable[[Scorer], Scorer]:
    """Give a reward function its metric name, and list the dataset columns it reads."""

    def mark(function: Scorer) -> Scorer:
        function.__name__ = name
        function.required_columns = columns  # type: ignore[attr-defined]
        return function

    return mark


def exact_match(column: str = "answer", *, pattern: str | None = None, ignore_case: bool = False) -> Scorer:
    """1 where the completion equals the reference, surrounding space aside, else 0. Not scored without a reference.

    Args:
        column: dataset column with the reference.
        pattern: regular expression; its last match in the completion (its first group, if it has one) is compared
            instead of the whole text, and no match scores 0.
        ignore_case: compare without regard to case.
    """
    expression = None if pattern is None else compile_pattern(pattern)

    def normal(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    def candidate(text: str) -> str | None:
        if expression is None:
            return text
        matches = list(expression.finditer(text))
        return matches[-1].group(1 if expression.groups else 0) if matches else None

    @named("exact_match", column)
    def score(completions: Sequence[PromptText], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for completion, reference in zip(completions, columns[column]):
            found = candidate(completion_text(completion))
            matches = found is not None and normal(found) == normal(str(reference))
            rewards.append(None if reference is None else float(matches))
        return rewards

    return score


def numeric_match(column: str = "answer", *, tolerance: float = 1e-6) -> Scorer:
    """1 where the completion's last number equals the reference, else 0. Not scored without a reference.

    Thousands separators, currency signs and a full stop after the number are understood. A text reference counts by its
    last number too, so that solutions ending in "#### 72" need no preparation.

    Args:
        column: dataset column with the reference, a number or text.
        tolerance: largest difference allowed, relative to the larger number or absolute, whichever is larger.
    """
    if not tolerance >= 0:
        raise ConfigError(f"numeric_match needs tolerance >= 0: got {tolerance}.")

    @named("numeric_match", column)
    def score(completions: Sequence[PromptText], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for completion, reference in zip(completions, columns[column]):
            if reference is None:
                rewards.append(None)
                continue
            expected, found = _reference_number(reference, column), last_number(completion_text(completion))
            close = found is not None and math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
            rewards.append(float(close))
        return rewards

    return score


def last_number(text: str) -> float | None:
    """The last number in a text: "so -$1,234.50." gives -1234.5."""
    plain = re.sub(r"[$€£]", "", text.replace("\u2212", "-"))
    found = NUMBER.findall(plain)
    return float(found[-1].replace(",", "")) if found else None


def _reference_number(reference: Any, column: str) -> float:
    if not isinstance(reference, str):
        return float(reference)
    number = last_number(reference)
    if number is None:
        raise ValueError(f"numeric_match: column {column!r} holds {reference!r}, in which there is no number.")
    return number


def regex(pattern: str, *, full_match: bool = False) -> Scorer:
    """1 where the pattern occurs in the completion, else 0.

    Args:
        pattern: Python regular expression; flags go inside it, as in "(?is)<think>.*</think>".
        full_match: the pattern must describe the whole completion.
    """
    expression = compile_pattern(pattern)
    find = expression.fullmatch if full_match else expression.search

    @named("regex")
    def score(completions: Sequence[PromptText], **_: Any) -> list[float | None]:
        return [float(find(completion_text(completion)) is not None) for completion in completions]

    return score


def compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"not a regular expression: {pattern!r} ({error}).") from error


def length(
    target: int | None = None,
    min: int | None = None,
    max: int | None = None,
    *,
    unit: Literal["tokens", "words", "characters"] = "tokens",
) -> Scorer:
    """0 for a completion of the wanted length, falling in proportion to -1 outside it.

        too short:  -(lower - n) / lower        too long:  -(n - upper) / upper, at least -1

    Args:
        target: the one length wanted; or else
        min, max: the shortest and longest wanted, either may be left out.
        unit: what is counted; tokens include the stop token.
    """
    units = ("tokens", "words", "characters")
    if unit not in units:
        raise ConfigError(f"length needs unit in {', '.join(units)}: got {unit!r}.{nearest(unit, units)}")
    if (target is None) == (min is None and max is None):
        raise ConfigError(f"length needs either target, or min and/or max: got target={target}, min={min}, max={max}.")
    lower, upper = (min or 0, max) if target is None else (target, target)
    if lower < 0 or (upper is not None and (upper < 1 or upper < lower)):
        raise ConfigError(f"length needs 0 <= min <= max and 1 <= max: got target={target}, min={min}, max={max}.")

    def measure(completion: PromptText, token_ids: Sequence[int]) -> int:
        if unit == "tokens":
            return len(token_ids)
        text = completion_text(completion)
        return len(text.split()) if unit == "words" else len(text)

    def rate(size: int) -> float:
        if size < lower:
            return -(lower - size) / lower
        return 0.0 if upper is None or size <= upper else -((size - upper) / upper if size < 2 * upper else 1.0)

    @named("length")
    def score(
        completions: Sequence[PromptText], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        return [rate(measure(text, token_ids)) for text, token_ids in zip(completions, completion_ids)]

    return score


def repetition(ngram: int = 3, *, max_penalty: float = 1.0) -> Scorer:
    """A penalty for repeating oneself: `-max_penalty` times the share of word n-grams that occurred before.

    Words are compared without case and punctuation. 0 for a text without repetition or with fewer than `ngram` words.

    Args:
        ngram: words that make one n-gram, at least 1.
        max_penalty: the most that is taken away, above 0.
    """
    if ngram < 1 or not 0 < max_penalty < math.inf:
        raise ConfigError(f"repetition needs ngram >= 1 and max_penalty > 0: got {ngram} and {max_penalty}.")

    def repeated_share(text: str) -> float:
        words = [bare_word(word) for word in text.split()]
        ngrams = [tuple(words[start : start + ngram]) for start in range(len(words) - ngram + 1)]
        return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0

    @named("repetition")
    def score(completions: Sequence[PromptText], **_: Any) -> list[float | None]:
        return [0.0 - max_penalty * repeated_share(completion_text(completion)) for completion in completions]

    return score
