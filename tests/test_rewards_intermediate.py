"""Intermediate rewards: lists of numbers for a completion, per token or per segment (S56)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_rollouts import make_rollouts

from quintain.rewards import RewardPipeline
from quintain.types import RewardOutput


def scored(*columns: list[Any], lengths: list[int], **settings: Any) -> RewardOutput:
    def constant(column: list[Any]) -> Any:
        return lambda completions: column

    pipeline = RewardPipeline([constant(column) for column in columns], **settings)
    return pipeline.score(make_rollouts(["text"] * len(lengths), lengths=lengths))


def placed(output: RewardOutput) -> list[list[float]]:
    assert output.token_rewards is not None
    return output.token_rewards.tolist()


def test_as_many_numbers_as_valid_tokens_are_one_a_token() -> None:
    output = scored([[1.0, 2.0, 3.0], torch.tensor([4.0, 5.0])], lengths=[3, 2])
    assert placed(output) == [[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]
    assert output.rewards.tolist() == [6.0, 9.0]


def test_fewer_numbers_land_on_the_last_token_of_equal_segments() -> None:
    """7 tokens in 2 segments end at ceil(3.5) and 7; 6 in 3 at 2, 4 and 6; a single number is the end of the text."""
    output = scored([[1.0, 2.0], [1.0, 2.0, 3.0], [9.0]], lengths=[7, 6, 5])
    assert placed(output) == [[0, 0, 0, 1, 0, 0, 2], [0, 1, 0, 2, 0, 3, 0], [0, 0, 0, 0, 9, 0, 0]]


def test_more_numbers_than_tokens_share_tokens_and_lose_nothing() -> None:
    assert placed(scored([[1.0, 2.0, 4.0, 8.0]], lengths=[2])) == [[3.0, 12.0]]


def test_plain_numbers_and_none_may_stand_beside_lists() -> None:
    output = scored([[1.0, 1.0], 5.0, None], lengths=[2, 2, 2])
    assert placed(output) == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert output.rewards.tolist() == [2.0, 5.0, 0.0]
    assert output.scored.tolist() == [True, True, False]


def test_intermediate_rewards_carry_their_functions_weight() -> None:
    output = scored([[1.0, 3.0]], [[10.0, 0.0]], [7.0], lengths=[2], weights=[0.5, 0.1, 2.0])
    assert placed(output) == [[1.5, 1.5]]
    assert output.rewards.tolist() == [17.0]


def test_a_function_of_weight_zero_places_nothing() -> None:
    output = scored([[1.0, 1.0]], [3.0], lengths=[2], weights=[0, 1])
    assert output.token_rewards is None
    assert output.components["lambda"].tolist() == [2.0]


def test_without_lists_there_are_no_token_rewards() -> None:
    assert scored([1.0], lengths=[2]).token_rewards is None


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [((-4.0, 4.0), [[1.0, 3.0], [-1.0, -3.0], [1.0, 1.0]]), ((1.0, 4.0), [[1.0, 3.0], [0.0, 0.0], [1.0, 1.0]])],
)
def test_clipping_shrinks_the_parts_and_never_turns_their_sign(bounds: Any, expected: list[list[float]]) -> None:
    output = scored([[2.0, 6.0], [-2.0, -6.0], [1.0, 1.0]], lengths=[2, 2, 2], reward_clip=bounds)
    assert placed(output) == expected


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=12), st.integers(1, 9))
def test_parts_sum_to_the_total_and_the_last_is_on_the_last_token(numbers: list[int], length: int) -> None:
    """Whatever the number of parts and tokens."""
    output = scored([[float(number) for number in numbers], [0.0]], lengths=[length, 9])
    row = placed(output)[0]
    assert sum(row) == sum(numbers) == output.rewards[0].item()
    assert row[length:] == [0.0] * (9 - length)
    last = [0.0] * (len(numbers) - 1) + [1.0]
    assert placed(scored([last], lengths=[length]))[0][length - 1] == 1.0
