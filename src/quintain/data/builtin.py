"""Prompts that come with the package: `builtin:NAME`, with options as in `builtin:reversal?length=4`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from quintain.data.files import rows_to_dataset
from quintain.data.options import call_with_options
from quintain.data.stories import TEST_PROMPTS, TRAIN_PROMPTS
from quintain.errors import ConfigError, nearest

Rows = list[dict[str, Any]]

SEPARATOR = ">"
"""Ends a reversal prompt; a tokenizer for it needs this character beside those of the task."""


def reversal(length: int = 5, characters: str = "01", size: int = 512, seed: int = 0) -> dict[str, Rows]:
    """Token reversal: after "0110>" the answer is "0110" read backwards.

    Args:
        length: characters of a prompt before the separator, at least 1.
        characters: the alphabet, at least two characters.
        size: most prompts; a smaller task has all of its prompts.
        seed: of the choice and the order.
    """
    alphabet = "".join(dict.fromkeys(characters))
    if len(alphabet) < 2 or SEPARATOR in alphabet:
        raise ConfigError(
            f"characters of builtin:reversal must be two or more, without the separator {SEPARATOR!r}: "
            f"got {characters!r}."
        )
    _require_positive("builtin:reversal", length=length, size=size)
    total = len(alphabet) ** length
    chosen = random.Random(seed).sample(range(total), min(size, total))
    texts = (
        "".join(alphabet[index // len(alphabet) ** place % len(alphabet)] for place in range(length))
        for index in chosen
    )
    return {"train": [{"prompt": text + SEPARATOR, "answer": text[::-1]} for text in texts]}


def stories() -> dict[str, Rows]:
    """Requests for a sentence or two on everyday matters, plain or a little gloomy: the mood of the reply is open."""
    return {
        name: [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
        for name, prompts in (("train", TRAIN_PROMPTS), ("test", TEST_PROMPTS))
    }


def arithmetic(
    level: int = 3, digits: int = 2, size: int = 512, seed: int = 0, words: bool = False, test: int = 0
) -> dict[str, Rows]:
    """Sums as chat prompts, with the number as `answer`. No two prompts are alike and no answer is negative.

    Args:
        level: 1 addition; 2 subtraction too; 3 multiplication too. The prompts are shared out evenly.
        digits: most digits of either number, at least 1. Problems whose longer number has 1, 2, ... digits come equally
            often, as far as there are as many.
        size: most prompts; a smaller task has all of its prompts.
        seed: of the choice and the order.
        words: tell each sum as a small story.
        test: most prompts of a second split, "test", drawn in the same way; none of them is a training prompt.
    """
    if level not in (1, 2, 3):
        raise ConfigError(f"level of builtin:arithmetic must be 1, 2 or 3: got {level}.")
    _require_positive("builtin:arithmetic", digits=digits, size=size)
    if test < 0:
        raise ConfigError(f"test of builtin:arithmetic must be 0 or more: got {test}.")
    generator = random.Random(seed)
    splits: dict[str, Rows] = {}
    taken: set[tuple[int, int]] = set()
    for split, wanted in (("test", test), ("train", size)):
        drawn = _draw_problems(level, digits, wanted, generator, taken)
        taken.update(drawn)
        splits[split] = [_sum(operation, *_pair(index, operation), words) for operation, index in drawn]
        generator.shuffle(splits[split])
    return splits if test else {"train": splits["train"]}


def _draw_problems(
    level: int, digits: int, number: int, generator: random.Random, taken: set[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Problems as (operation, index of its pair), none of them `taken`: as many of each operation and length."""
    drawn = []
    for operation in range(level):
        share = number // level + (operation < number % level)
        ends = [0, *(_pairs_below(10**length, operation) for length in range(1, digits + 1))]
        for start, end, left in zip(ends, ends[1:], range(digits, 0, -1)):
            gone = sum(other == operation and start <= index < end for other, index in taken)
            count = min(-(-share // left), end - start - gone)
            share -= count
            free = ((operation, index) for index in generator.sample(range(start, end), count + gone))
            drawn += [problem for problem in free if problem not in taken][:count]
    return drawn


BUILTIN: dict[str, Callable[..., dict[str, Rows]]] = {
    "reversal": reversal,
    "stories": stories,
    "arithmetic": arithmetic,
}
"""Rows by split, for each name after `builtin:`; the functions' parameters are the options."""


def load_builtin(name: str, options: Mapping[str, str], reference: str) -> dict[str, Any]:
    """The splits of a built-in dataset.

    Raises:
        ConfigError: unknown name, or an option that is unknown or out of range.
    """
    if name not in BUILTIN:
        raise ConfigError(f"There is no builtin:{name}.{nearest(name, BUILTIN)} Known: {', '.join(BUILTIN)}.")
    splits = call_with_options(BUILTIN[name], options, reference)
    return {split: rows_to_dataset(rows, reference) for split, rows in splits.items()}


_SYMBOLS = ("+", "-", "*")
_STORIES = (
    "A shelf holds {0} books and {1} more are put on it. How many books does it hold now?",
    "A shop has {0} apples and sells {1} of them. How many apples are left?",
    "Each of {0} boxes holds {1} pencils. How many pencils are there in all?",
)


def _sum(operation: int, first: int, second: int, words: bool) -> dict[str, Any]:
    """One row; the operations are those of `_SYMBOLS`."""
    question = (
        _STORIES[operation].format(first, second) if words else f"What is {first} {_SYMBOLS[operation]} {second}?"
    )
    answer = (first + second, first - second, first * second)[operation]
    content = f"{question} Answer with the number only."
    return {"prompt": [{"role": "user", "content": content}], "answer": str(answer)}


def _pairs_below(number: int, operation: int) -> int:
    """How many pairs of numbers below this one there are; for a subtraction, with the larger first."""
    return number * (number + 1) // 2 if operation == 1 else number**2


def _pair(index: int, operation: int) -> tuple[int, int]:
    """The index-th pair in an order in which the larger number never falls."""
    if operation == 1:  # (0, 0), (1, 0), (1, 1), (2, 0), ...
        larger = (math.isqrt(8 * index + 1) - 1) // 2
        return larger, index - larger * (larger + 1) // 2
    larger = math.isqrt(index)  # (0, 0), (1, 0), (1, 1), (0, 1), (2, 0), (2, 1), (2, 2), (0, 2), ...
    rest = index - larger**2
    return (larger, rest) if rest <= larger else (rest - larger - 1, larger)


def _require_positive(reference: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} of {reference} must be 1 or more: got {value}.")
