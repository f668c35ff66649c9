"""Several rewards, weights, unscored rows, clipping (T10, S55, S57)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_rollouts import make_rollouts

from quintain.errors import RewardError
from quintain.rewards import RewardPipeline
from quintain.types import RewardOutput

SCORES = st.one_of(st.none(), st.integers(-10, 10))


def combined(*columns: list[Any], **settings: Any) -> RewardOutput:
    """The output of functions that return the given columns."""

    def constant(column: list[Any]) -> Any:
        return lambda completions: column

    pipeline = RewardPipeline([constant(column) for column in columns], **settings)
    return pipeline.score(make_rollouts(["text"] * len(columns[0])))


def test_totals_are_weighted_sums_and_a_weight_of_zero_changes_nothing() -> None:
    """T10."""
    output = combined([1, 0, 1, 0], [0, 0, 1, 1], [5, 5, 9, 9], weights=[0.7, 0.3, 0])
    torch.testing.assert_close(output.rewards, torch.tensor([0.7, 0.0, 1.0, 0.3]))
    assert [column.mean().item() for column in output.components.values()] == [0.5, 0.5, 7.0]
    assert output.scored.all()


def test_a_row_that_no_function_scored_is_absent_not_zero() -> None:
    """T10, the variant with None."""
    output = combined([1, None, 1, 0], [0, None, 1, 1], weights=[0.7, 0.3])
    assert output.scored.tolist() == [True, False, True, True]
    torch.testing.assert_close(output.rewards, torch.tensor([0.7, 0.0, 1.0, 0.3]))
    assert output.rewards[output.scored].mean().item() == pytest.approx(0.666667, abs=1e-6)
    for column in output.components.values():
        assert column.isnan().tolist() == [False, True, False, False]


def test_a_function_that_returned_none_is_left_out_of_that_rows_sum() -> None:
    output = combined([1, None], [None, 2], weights=[3.0, 0.5])
    assert output.rewards.tolist() == [3.0, 1.0]
    assert output.scored.all()


def test_a_score_of_weight_zero_does_not_make_a_row_scored() -> None:
    output = combined([None, 1], [5, 5], weights=[1, 0])
    assert output.scored.tolist() == [False, True]


def test_clipping_bounds_totals_and_counts_them() -> None:
    """S57."""
    output = combined([1e30, 2, -7, None], reward_clip=5)
    assert output.rewards.tolist() == [5.0, 2.0, -5.0, 0.0]
    assert output.metrics["rewards/clipped_fraction"] == 0.5


def test_clipping_to_an_interval_away_from_zero_leaves_unscored_rows_alone() -> None:
    output = combined([3, None, 0], reward_clip=(1, 2))
    assert output.rewards.tolist() == [2.0, 0.0, 1.0]
    assert output.metrics["rewards/clipped_fraction"] == pytest.approx(2 / 3)


def test_a_total_beyond_float32_is_refused_with_its_row() -> None:
    with pytest.raises(RewardError, match="row 1, the weighted sum of lambda, is beyond float32"):
        combined([0, 3e38], weights=[2.0])


@given(
    st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=6),
    st.floats(0.1, 5),
)
def test_rewards_are_finite_within_the_clip_range_and_zero_where_unscored(rows: list[Any], bound: float) -> None:
    first, second = [row[0] for row in rows], [row[1] for row in rows]
    output = combined(first, second, weights=[1.5, -0.5], reward_clip=bound)
    assert output.rewards.isfinite().all()
    assert (output.rewards.abs() <= bound * (1 + 1e-6)).all()
    for reward, scored, row in zip(output.rewards.tolist(), output.scored.tolist(), rows):
        assert scored == (row != (None, None))
        assert scored or reward == 0
