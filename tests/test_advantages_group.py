"""Advantages relative to a group or to the batch: known answers (T03, T10), ties, row order, rows without a score."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintain.advantages.group import (
    batch_baseline,
    batch_whitened,
    group_centred_batch_scaled,
    group_mean_centred,
    group_relative,
    leave_one_out,
    tied_fraction,
    tied_groups,
)

P, Q, S = [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [3.0, 1.0, 0.0, 0.0]
REWARDS = torch.tensor([*P, *Q, *S])
GROUPS = torch.arange(3).repeat_interleave(4)
ALL = torch.ones(12, dtype=torch.bool)

GROUPED = {
    "group_mean_centred": group_mean_centred,
    "group_relative": group_relative,
    "group_relative_population": lambda r, g, s: group_relative(r, g, s, correction=0),
    "group_centred_batch_scaled": group_centred_batch_scaled,
    "leave_one_out": leave_one_out,
}
EVERY = {
    **GROUPED,
    "batch_baseline": lambda r, g, s: batch_baseline(r, s),
    "batch_whitened": lambda r, g, s: batch_whitened(r, s),
}


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-6, rtol=0)


def test_group_relative_with_the_sample_standard_deviation():
    """T03; GRPO's default."""
    expected = [0.0] * 4 + [-0.5, -0.5, -0.5, 1.5] + [1.414214, 0.0, -0.707107, -0.707107]
    close(group_relative(REWARDS, GROUPS, ALL), expected)


def test_group_relative_with_the_population_standard_deviation():
    """T03."""
    expected = [0.0] * 4 + [-0.577350] * 3 + [1.732051] + [1.632993, 0.0, -0.816497, -0.816497]
    close(group_relative(REWARDS, GROUPS, ALL, correction=0), expected)


def test_leave_one_out():
    """T03."""
    expected = [0.0] * 4 + [-0.333333] * 3 + [1.0] + [2.666667, 0.0, -1.333333, -1.333333]
    close(leave_one_out(REWARDS, GROUPS, ALL), expected)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    rewards, groups = torch.tensor([0.7, -1.3, 2.9]), torch.zeros(3, dtype=torch.long)
    expected = [0.7 - (-1.3 + 2.9) / 2, -1.3 - (0.7 + 2.9) / 2, 2.9 - (0.7 - 1.3) / 2]
    close(leave_one_out(rewards, groups, torch.ones(3, dtype=torch.bool)), expected)


def test_centred_on_the_group_and_scaled_by_the_batch():
    spread = REWARDS.std()
    centred = torch.tensor([0.0] * 4 + [-0.25] * 3 + [0.75] + [2.0, 0.0, -1.0, -1.0])
    torch.testing.assert_close(group_mean_centred(REWARDS, GROUPS, ALL), centred)
    torch.testing.assert_close(group_centred_batch_scaled(REWARDS, GROUPS, ALL), centred / spread)


def test_batch_baseline_and_whitening():
    rewards, scored = torch.tensor([0.0, 2.0, 4.0, 99.0]), torch.tensor([True, True, True, False])
    close(batch_baseline(rewards, scored), [-2.0, 0.0, 2.0, 0.0])
    close(batch_whitened(rewards, scored), [-1.224745, 0.0, 1.224745, 0.0])


def test_weighted_totals_of_one_group():
    """T10: 0.7 * [1, 0, 1, 0] + 0.3 * [0, 0, 1, 1]."""
    rewards, groups, scored = torch.tensor([0.7, 0.0, 1.0, 0.3]), torch.zeros(4, dtype=torch.long), ALL[:4]
    close(leave_one_out(rewards, groups, scored), [0.266667, -0.666667, 0.666667, -0.266667])
    close(group_relative(rewards, groups, scored), [0.454859, -1.137147, 1.137147, -0.454859])


@pytest.mark.parametrize("unscored", [0.0, 1e9, math.nan])
def test_a_row_without_score_is_no_member_of_its_group(unscored):
    """T10: row 2 was scored by nobody."""
    rewards, groups = torch.tensor([0.7, unscored, 1.0, 0.3]), torch.zeros(4, dtype=torch.long)
    scored = torch.tensor([True, False, True, True])
    close(leave_one_out(rewards, groups, scored), [0.05, 0.0, 0.5, -0.55])
    close(group_relative(rewards, groups, scored), [0.094916, 0.0, 0.949158, -1.044074])


@pytest.mark.parametrize("name", EVERY)
def test_a_single_scored_row_has_no_advantage(name):
    """T10."""
    rewards, groups = torch.tensor([0.7, math.nan, math.nan]), torch.zeros(3, dtype=torch.long)
    assert EVERY[name](rewards, groups, torch.tensor([True, False, False])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", EVERY)
def test_a_batch_without_any_score_has_no_advantage(name):
    nothing = torch.zeros(12, dtype=torch.bool)
    assert EVERY[name](torch.full((12,), math.nan), GROUPS, nothing).eq(0).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("level", [0.1, 0.3, 1.0, -7.7, 1e6, -1e6 / 3])
@pytest.mark.parametrize("size", [3, 4, 7, 11])
def test_equal_rewards_give_exactly_zero(name, level, size):
    """A mean of equal float32 numbers is not always that number."""
    groups, scored = torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool)
    assert EVERY[name](torch.full((size,), level), groups, scored).tolist() == [0.0] * size


@pytest.mark.parametrize("name", EVERY)
def test_rounding_noise_is_not_signal_and_a_small_difference_is(name):
    """T03: a near-tie has advantages of at most 0.01, and 0.001 apart is not a tie."""
    groups, scored = torch.zeros(4, dtype=torch.long), ALL[:4]
    assert EVERY[name](torch.tensor([0.3, 0.3, 0.3000001, 0.3]), groups, scored).abs().max() <= 0.01
    assert EVERY[name](torch.tensor([0.0, 0.0, 0.0, 0.001]), groups, scored)[3] > 0


def test_a_small_difference_keeps_its_full_relative_size():
    """No epsilon is added to the standard deviation."""
    small = group_relative(torch.tensor([0.0, 0.0, 0.0, 0.001]), GROUPS[:4], ALL[:4])
    close(small, [-0.5, -0.5, -0.5, 1.5])


def test_tied_groups_and_their_fraction():
    """T03: one of three."""
    assert tied_groups(REWARDS, GROUPS, ALL).tolist() == [True, False, False]
    assert tied_fraction(REWARDS, GROUPS, ALL).item() == pytest.approx(1 / 3)


def test_groups_without_any_score_are_left_out_of_the_tied_fraction():
    scored = ALL.clone()
    scored[8:] = False
    assert tied_fraction(REWARDS, GROUPS, scored).item() == pytest.approx(1 / 2)
    assert tied_fraction(REWARDS, GROUPS, torch.zeros_like(ALL)) == 0


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(12)), names=st.permutations([-5, 3, 1000]))
def test_shuffling_rows_and_renaming_groups_permutes_the_result_and_nothing_else(order, names):
    """T03."""
    groups = torch.tensor(names)[GROUPS]
    scored = ALL.clone()
    scored[[5, 9]] = False
    for function in EVERY.values():
        expected = function(REWARDS, GROUPS, scored)[order]
        torch.testing.assert_close(function(REWARDS[order], groups[order], scored[order]), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", EVERY)
def test_a_constant_added_to_every_reward_changes_nothing(name):
    shifted = EVERY[name](REWARDS + 5, GROUPS, ALL)
    torch.testing.assert_close(shifted, EVERY[name](REWARDS, GROUPS, ALL), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", GROUPED)
def test_ragged_groups_are_each_their_own_and_add_up_to_zero(name):
    rewards = torch.tensor([1.0, 5.0, 2.0, 0.0, 4.0, 9.0])
    groups = torch.tensor([7, 2, 7, 2, 2, 30])
    advantages = GROUPED[name](rewards, groups, ALL[:6])
    for group in (7, 2, 30):
        assert advantages[groups == group].sum().item() == pytest.approx(0, abs=1e-6)
    assert advantages[5] == 0 and advantages[0] < 0 < advantages[2] and advantages[1] > advantages[4] > advantages[3]
