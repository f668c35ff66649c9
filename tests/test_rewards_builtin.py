"""The built-in rewards, against answers worked by hand (S55)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_rollouts import make_rollouts

from quintain.errors import ConfigError, RewardError
from quintain.rewards import REWARDS, RewardPipeline, completion_text
from quintain.rewards.functions import exact_match, last_number, length, numeric_match, regex, repetition


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_completion_text_reads_text_chats_and_content_parts() -> None:
    assert completion_text("plain") == "plain"
    assert completion_text(chat("one") + chat("two")) == "one\ntwo"
    parts: Any = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert completion_text([{"role": "assistant", "content": parts}]) == "ab"
    assert completion_text([{"role": "assistant", "content": None}]) == ""


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("exact_match", {}),
        ("numeric_match", {}),
        ("regex", {"pattern": "4"}),
        ("length", {"max": 2, "unit": "characters"}),
        ("repetition", {"ngram": 1}),
        ("sentiment", {}),
    ],
)
def test_text_and_chat_completions_score_alike_under_the_registered_name(name: str, kwargs: dict[str, Any]) -> None:
    texts = ["42", "so happy happy, 4.2"]
    pipeline = RewardPipeline(REWARDS[name](**kwargs), columns=["answer"])
    assert pipeline.names == [name]
    columns = {"answer": ["42", "42"]}
    plain = pipeline.score(make_rollouts(texts, columns=columns)).rewards
    chats = pipeline.score(make_rollouts([chat(text) for text in texts], columns=columns)).rewards
    assert plain.tolist() == chats.tolist()
    assert plain[0] != plain[1] or name == "regex"


def test_a_built_in_says_at_construction_which_column_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"'exact_match' asks for 'solution'.*Available columns: answer\."):
        RewardPipeline(exact_match(column="solution"), columns=["answer"])


def test_exact_match_ignores_surrounding_space_only() -> None:
    score = exact_match()
    assert score(completions=[" Paris\n", "paris", "Paris.", "x"], answer=["Paris", "Paris", "Paris", None]) == [
        1.0, 0.0, 0.0, None,
    ]  # fmt: skip
    assert exact_match(ignore_case=True)(completions=["paris"], answer=["Paris"]) == [1.0]
    assert exact_match("key")(completions=["7"], key=[7]) == [1.0]


def test_exact_match_compares_the_last_match_of_its_pattern() -> None:
    score = exact_match(pattern=r"<answer>(.*?)</answer>")
    texts = ["<answer>3</answer> no, <answer> 4 </answer>", "4", "<answer>3</answer>"]
    assert score(completions=texts, answer=["4"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 72.", 72.0),
        ("5 + 3 = 8", 8.0),
        ("5-3", 3.0),
        ("it is -3", -3.0),
        ("(2)-3", 3.0),
        ("-$1,234.50.", -1234.5),
        ("\u22127", -7.0),
        ("1,2,3", 3.0),
        ("1,234,567", 1234567.0),
        ("12,34", 34.0),
        ("x=.5", 0.5),
        ("about 1e-3", 0.001),
        ("#### 72", 72.0),
        ("\\boxed{10}", 10.0),
        ("50% of it", 50.0),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(st.floats(-1e9, 1e9), st.sampled_from(["{}", "so {}.", "= {:,}", "${}", "1, 2 and {}"]))
def test_a_written_number_is_read_back(number: float, template: str) -> None:
    number = round(number, 3)
    assert last_number(template.format(number)) == number


def test_numeric_match_reads_references_of_every_kind() -> None:
    score = numeric_match()
    texts = ["It is 1,234.", "72", "72", "0.3333333", "72.1", "I do not know", "5"]
    answers = [1234, "48 / 2 = 24\n#### 72", "72.0", 1 / 3, "72", "72", None]
    assert score(completions=texts, answer=answers) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, None]
    assert numeric_match(tolerance=0.01)(completions=["72.1"], answer=["72"]) == [1.0]
    assert numeric_match()(completions=["1e-9", "0.1"], answer=["0", "0"]) == [1.0, 0.0]
    assert numeric_match(tolerance=0)(completions=["72"], answer=["72"]) == [1.0]


def test_numeric_match_refuses_a_reference_without_a_number() -> None:
    rollouts = make_rollouts(["1", "2"], columns={"answer": ["1", "two"]})
    with pytest.raises(RewardError, match=r"numeric_match.*row 1.*'two'"):
        RewardPipeline(numeric_match()).score(rollouts)


def test_regex_searches_or_matches_the_whole() -> None:
    assert regex(r"\d")(completions=["a1", "b"]) == [1.0, 0.0]
    assert regex(r"\d", full_match=True)(completions=["a1", "1"]) == [0.0, 1.0]
    with pytest.raises(ConfigError, match=r"not a regular expression: '\('"):
        regex("(")


def test_length_falls_in_proportion_outside_its_bounds() -> None:
    def rewards(sizes: list[int], **kwargs: Any) -> list[float]:
        return length(**kwargs)(completions=["x"] * len(sizes), completion_ids=[[0] * size for size in sizes])  # type: ignore[return-value]

    assert rewards([10, 5, 15, 0, 50], target=10) == [0.0, -0.5, -0.5, -1.0, -1.0]
    assert rewards([3, 4, 8, 10], min=4, max=8) == [-0.25, 0.0, 0.0, -0.25]
    assert rewards([0, 100], max=100) == [0.0, 0.0]
    assert rewards([2, 100], min=4) == [-0.5, 0.0]
    assert length(max=2, unit="words")(completions=["a b c"], completion_ids=[[]]) == [-0.5]
    assert length(max=2, unit="characters")(completions=["abc"], completion_ids=[[]]) == [-0.5]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"target": 5, "max": 6}, {"min": 5, "max": 4}, {"target": 0}, {"min": -1}, {"max": 4, "unit": "token"}],
)
def test_length_refuses_bounds_that_make_no_sense(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="length needs"):
        length(**kwargs)


def test_repetition_takes_away_the_share_of_repeated_ngrams() -> None:
    """ "a a, A a" has four 1-grams, one distinct; "a b a b a" has four 2-grams, two distinct."""
    assert repetition(ngram=1)(completions=["a a, A a", "a b", ""]) == [-0.75, 0.0, 0.0]
    assert repetition(ngram=2, max_penalty=2)(completions=["a b a b a"]) == [-1.0]
    assert repetition()(completions=["too short"]) == [0.0]
    with pytest.raises(ConfigError, match="ngram >= 1"):
        repetition(ngram=0)


def test_sentiment_is_vaders_compound_score() -> None:
    """VADER's own README: "VADER is smart, handsome, and funny." is 0.8316."""
    rewards = REWARDS["sentiment"]()(completions=["VADER is smart, handsome, and funny.", "", "This is terrible."])
    assert rewards[0] == 0.8316 and rewards[1] == 0.0 and rewards[2] < 0  # type: ignore[operator]


def test_distinct_sentiment_gains_nothing_from_repeating_a_word() -> None:
    """S57: saying "happy" over and over is the loophole of the plain score."""
    once, spam = "a happy day", "a happy day Happy, happy happy happy"
    plain, distinct = REWARDS["sentiment"](), REWARDS["sentiment"](distinct=True)
    low, high = plain(completions=[once, spam])
    assert low < high  # type: ignore[operator]
    assert distinct(completions=[once, spam]) == [low, low]


def test_a_reward_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(ConfigError, match=r'pip install "quintain\[sentiment\]"'):
        REWARDS["sentiment"]()


def test_math_verify_compares_values_not_text() -> None:
    pytest.importorskip("math_verify")
    score = REWARDS["math_verify"]()
    texts = ["so it is $\\frac{1}{2}$", "the answer is 0.5", "$\\boxed{2}$", "no idea", "x"]
    answers = ["\\frac{1}{2}", "1/2", "#### 3", "4", None]
    assert score(completions=texts, answer=answers) == [1.0, 1.0, 0.0, 0.0, None]


def test_math_verify_works_under_a_time_limit() -> None:
    """Its own limit uses a signal, which fails outside the main thread."""
    pytest.importorskip("math_verify")
    pipeline = RewardPipeline(REWARDS["math_verify"](), reward_timeout=20)
    assert pipeline.score(make_rollouts(["It is $4$."], columns={"answer": ["4"]})).rewards.tolist() == [1.0]


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_json_schema_accepts_what_validates(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    texts = ['{"age": 3}', '```json\n{"age": 3}\n```', '{"age": "3"}', "age: 3", "[" * 100_000]
    for schema in (SCHEMA, str(tmp_path / "schema.json")):
        assert REWARDS["json_schema"](schema)(completions=texts) == [1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="invalid schema"):
        REWARDS["json_schema"]({"type": "nonsense"})
    with pytest.raises(ConfigError, match="cannot read its schema"):
        REWARDS["json_schema"](str(tmp_path / "absent.json"))


def test_reasoning_gym_scores_with_the_prompts_own_task() -> None:
    gym = pytest.importorskip("reasoning_gym")
    task = gym.create_dataset("basic_arithmetic", size=2, seed=1)
    metadata = [task[0]["metadata"], json.dumps(task[1]["metadata"])]
    answers = [task[0]["answer"], task[1]["answer"]]
    score = REWARDS["reasoning_gym"]()
    texts = [f"<answer>1000</answer> or <answer>{answers[0]}</answer>", answers[1]]
    assert score(completions=texts, metadata=metadata, answer=answers) == [1.0, 1.0]
    assert score(completions=["x", "y"], metadata=metadata, answer=answers) == [0.0, 0.0]
