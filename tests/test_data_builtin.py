"""Prompts that come with the package."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintain.data import BUILTIN, load_dataset_reference
from quintain.data.builtin import arithmetic, reversal
from quintain.errors import ConfigError


@settings(deadline=None)
@given(length=st.integers(1, 6), characters=st.sampled_from(["01", "abc"]), size=st.integers(1, 90))
def test_every_reversal_answer_is_its_prompt_backwards_and_no_prompt_comes_twice(length, characters, size):
    rows = reversal(length, characters, size)["train"]
    assert len(rows) == min(size, len(characters) ** length) == len({row["prompt"] for row in rows})
    for row in rows:
        assert re.fullmatch(f"[{characters}]{{{length}}}>", row["prompt"])
        assert row["answer"] == row["prompt"][-2::-1]


def test_reversal_takes_its_options_from_the_reference():
    rows = load_dataset_reference("builtin:reversal?length=2&characters=ab")
    assert sorted(rows["prompt"]) == ["aa>", "ab>", "ba>", "bb>"]


@settings(deadline=None)
@given(level=st.sampled_from([1, 2, 3]), digits=st.integers(1, 4), words=st.booleans(), seed=st.integers(0, 99))
def test_every_arithmetic_answer_is_right_and_no_prompt_comes_twice(level, digits, words, seed):
    rows = arithmetic(level, digits, 30, seed, words)["train"]
    assert len(rows) == 30 == len({row["prompt"][0]["content"] for row in rows})
    for row in rows:
        text = row["prompt"][0]["content"]
        first, second = (int(number) for number in re.findall(r"\d+", text))
        assert max(first, second) < 10**digits
        if words:
            results = {"books": first + second, "apples": first - second, "pencils": first * second}
            answer = next(value for word, value in results.items() if word in text)
        else:
            answer = {"+": first + second, "-": first - second, "*": first * second}[re.search(r"[-+*]", text).group()]
        assert row["answer"] == str(answer)
        assert answer >= 0
        assert text.endswith("Answer with the number only.")


def test_a_small_arithmetic_task_has_every_problem_once():
    """One digit: 100 additions and, as the first number is the larger, 55 subtractions."""
    rows = arithmetic(level=2, digits=1, size=500)["train"]
    assert sum("+" in row["prompt"][0]["content"] for row in rows) == 100
    assert sum(" - " in row["prompt"][0]["content"] for row in rows) == 55


def test_stories_are_distinct_short_chats_and_the_test_split_is_held_out():
    train = load_dataset_reference("builtin:stories")
    test = load_dataset_reference("builtin:stories", split="test")
    texts = [[row["prompt"][0]["content"] for row in part] for part in (train, test)]
    assert (len(texts[0]), len(texts[1])) == (64, 16)
    assert len(set(texts[0] + texts[1])) == 80
    assert all(len(row["prompt"]) == 1 and row["prompt"][0]["role"] == "user" for row in train)
    assert all("sentence" in text or text.startswith("Write") for text in texts[0] + texts[1])


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_the_same_reference_gives_the_same_rows(name):
    assert list(load_dataset_reference(f"builtin:{name}")) == list(load_dataset_reference(f"builtin:{name}"))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_easy_and_hard_problems_come_equally_often(level):
    """Drawn by value, nine in ten numbers below 1000 would have three digits."""
    rows = arithmetic(level, digits=3, size=90)["train"]
    lengths = [max(map(len, re.findall(r"\d+", row["prompt"][0]["content"]))) for row in rows]
    assert [lengths.count(length) for length in (1, 2, 3)] == [30, 30, 30]
    few_easy = arithmetic(level=1, digits=2, size=300)["train"]  # there are 100 sums of two digits alone
    assert sum(len(re.findall(r"\d", row["prompt"][0]["content"])) == 2 for row in few_easy) == 100


def test_arithmetic_keeps_a_test_split_of_the_same_kind_out_of_training():
    """One digit has 100 sums: 20 are tested, so that only 80 are left to train on."""
    splits = arithmetic(level=1, digits=3, size=300, test=60)
    train, test = ([row["prompt"][0]["content"] for row in splits[name]] for name in ("train", "test"))
    assert (len(train), len(test)) == (300, 60)
    assert not set(train) & set(test)
    lengths = [max(map(len, re.findall(r"\d+", text))) for text in test]
    assert [lengths.count(length) for length in (1, 2, 3)] == [20, 20, 20]
    assert sum(max(map(len, re.findall(r"\d+", text))) == 1 for text in train) == 80
    assert list(arithmetic(level=1, digits=2, size=10)) == ["train"]


@pytest.mark.parametrize("name", ["reversal", "arithmetic"])
def test_another_seed_gives_another_order(name):
    first, second = (load_dataset_reference(f"builtin:{name}?size=20&seed={seed}") for seed in (0, 1))
    assert list(first) != list(second)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("builtin:reversal?lenght=3", "unknown option 'lenght'.*Did you mean 'length'"),
        ("builtin:reversal?length=three", "'length'.*must be a int such as 5: got 'three'"),
        ("builtin:reversal?length=0", "length.*1 or more: got 0"),
        ("builtin:reversal?characters=0", "two or more"),
        ("builtin:reversal?characters=0>", "without the separator '>'"),
        ("builtin:arithmetic?level=4", "1, 2 or 3: got 4"),
        ("builtin:arithmetic?test=-1", "0 or more: got -1"),
        ("builtin:arithmetic?words=yess", "'words'.*must be a bool"),
        ("builtin:stories?size=3", "unknown option 'size'.*Known: none"),
    ],
)
def test_a_wrong_option_is_refused(reference, words):
    with pytest.raises(ConfigError, match=words):
        load_dataset_reference(reference)
