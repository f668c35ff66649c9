"""Built-in rewards that wrap a library. Each library is imported when its reward is made, and only then."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quintain.errors import ConfigError
from quintain.rewards.functions import Scorer, named
from quintain.rewards.text import bare_word, completion_text
from quintain.types import PromptText

MATH_TIMEOUT_SECONDS = 5
FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n\s*```\s*", re.DOTALL)


def _require(module: str, reward: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"the reward {reward!r} needs {module}, which cannot be imported: {install}") from error


def sentiment(*, distinct: bool = False) -> Scorer:
    """How positive a completion sounds, from -1 to 1: VADER's compound score.

    VADER adds up the words' valences, so that repeating one happy word scores as well as a happy text does.

    Args:
        distinct: count each word once, which takes that way out.

    Source: Hutto & Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text".
    """
    vader = _require("vaderSentiment.vaderSentiment", "sentiment", 'pip install "quintain[sentiment]"')
    analyzer = vader.SentimentIntensityAnalyzer()

    @named("sentiment")
    def score(completions: Sequence[PromptText], **_: Any) -> list[float | None]:
        texts = [completion_text(completion) for completion in completions]
        return [analyzer.polarity_scores(_first_uses(text) if distinct else text)["compound"] for text in texts]

    return score


def _first_uses(text: str) -> str:
    """The words of a text, each only where it occurs first, without regard to case or punctuation."""
    words: dict[str, str] = {}
    for word in text.split():
        words.setdefault(bare_word(word), word)
    return " ".join(words.values())


def math_verify(column: str = "answer") -> Scorer:
    """1 where the completion's answer is mathematically equal to the reference, else 0 (math-verify).

    Not scored where there is no reference, or one that math-verify cannot read.

    Args:
        column: dataset column with the reference: a number, LaTeX, or text that ends in "#### answer".
    """
    library = _require("math_verify", "math_verify", 'pip install "quintain[math]"')
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns whenever its time limit is off, as below

    @named("math_verify", column)
    def score(completions: Sequence[PromptText], **columns: Any) -> list[float | None]:
        # Its time limit uses a signal, which only the main thread may; elsewhere `reward_timeout` is the limit.
        main = threading.current_thread() is threading.main_thread()
        seconds = MATH_TIMEOUT_SECONDS if main else None

        def parse(text: str) -> Any:
            return library.parse(text, parsing_timeout=seconds)

        rewards: list[float | None] = []
        for completion, reference in zip(completions, columns[column]):
            text = "" if reference is None else str(reference).rsplit("####", 1)[-1].strip()
            gold = parse(f"${text}$") or parse(text)
            found = parse(completion_text(completion)) if gold else None
            rewards.append(float(library.verify(gold, found, timeout_seconds=seconds)) if gold else None)
        return rewards

    return score


def json_schema(schema: dict[str, Any] | str | os.PathLike[str]) -> Scorer:
    """1 where the completion is JSON that satisfies the schema, else 0. One Markdown code fence around it is allowed.

    Args:
        schema: a JSON Schema, or the path of a file with one.
    """
    library = _require("jsonschema", "json_schema", "pip install jsonschema")
    if not isinstance(schema, dict):
        try:
            schema = json.loads(Path(schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"json_schema cannot read its schema from {schema!r}: {error}.") from error
    validator_class = library.validators.validator_for(schema)
    try:
        validator_class.check_schema(schema)
    except library.exceptions.SchemaError as error:
        raise ConfigError(f"json_schema got an invalid schema: {error.message}.") from error
    validator = validator_class(schema)

    def satisfies(text: str) -> bool:
        fenced = FENCED.fullmatch(text)
        try:
            return bool(validator.is_valid(json.loads(fenced.group(1) if fenced else text)))
        except (ValueError, RecursionError):  # not JSON, or nested beyond what Python can read
            return False

    @named("json_schema")
    def score(completions: Sequence[PromptText], **_: Any) -> list[float | None]:
        return [float(satisfies(completion_text(completion))) for completion in completions]

    return score


def reasoning_gym(column: str = "metadata", *, answer_column: str = "answer", tag: str = "answer") -> Scorer:
    """What the reasoning-gym task that a prompt came from gives for the completion, from 0 to 1.

    Args:
        column: dataset column with the task's metadata, a mapping or JSON text; its "source_dataset" names the task.
        answer_column: dataset column with the task's own answer.
        tag: the text inside the last <tag>...</tag> is the answer; without one, the whole completion is.
    """
    library = _require("reasoning_gym", "reasoning_gym", 'pip install "quintain[reasoning-gym]"')
    extract = library.utils.extract_answer
    scorer: Callable[[str], Callable[..., float]] = functools.cache(library.get_score_answer_fn)

    @named("reasoning_gym", column, answer_column)
    def score(completions: Sequence[PromptText], **columns: Any) -> list[float | None]:
        rewards: list[float | None] = []
        for completion, metadata, answer in zip(completions, columns[column], columns[answer_column]):
            details = json.loads(metadata) if isinstance(metadata, str) else metadata
            text = completion_text(completion)
            found = extract(text, tag_name=tag)
            entry = {"question": details.get("question"), "answer": answer, "metadata": details}
            rewards.append(
                scorer(details["source_dataset"])(answer=text.strip() if found is None else found, entry=entry)
            )
        return rewards

    return score
