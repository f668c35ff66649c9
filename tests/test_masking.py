"""Masked reductions: known answers, and masked entries that hold NaN change neither value nor gradient (S14, T05)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintain.masking import (
    is_tied,
    masked_mean,
    masked_row_mean,
    masked_row_sum,
    masked_sum,
    masked_variance,
    masked_whiten,
    zero_masked,
)

MASK = torch.tensor([[True, True, False], [True, False, False]])
REDUCTIONS = {
    "zero_masked": zero_masked,
    "masked_sum": masked_sum,
    "masked_mean": masked_mean,
    "masked_row_sum": masked_row_sum,
    "masked_row_mean": masked_row_mean,
    "masked_variance": masked_variance,
    "sample_variance": lambda values, mask: masked_variance(values, mask, correction=1),
    "masked_whiten": masked_whiten,
    "masked_scale": lambda values, mask: masked_whiten(values, mask, shift_mean=False),
}


def value_and_gradient(reduction, values, mask):
    """The reduction, and the gradient of a sum that weighs its entries unequally."""
    values = values.clone().requires_grad_()
    result = reduction(values, mask)
    weights = torch.arange(1.0, result.numel() + 1).reshape(result.shape)
    (weights * result).sum().backward()
    return result.detach(), values.grad


def test_reductions_of_three_numbers():
    values = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]])
    assert masked_sum(values, MASK) == 9
    assert masked_mean(values, MASK) == 3
    assert masked_row_sum(values, MASK).tolist() == [3, 6]
    assert masked_row_mean(values, MASK).tolist() == [1.5, 6]
    assert masked_variance(values, MASK).item() == pytest.approx(14 / 3)
    assert masked_variance(values, MASK, correction=1) == 7


def test_whitening_gives_mean_0_and_variance_1_over_the_true_entries():
    values = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]])
    root = math.sqrt(14 / 3)
    expected = torch.tensor([[-2 / root, -1 / root, 0.0], [3 / root, 0.0, 0.0]])
    torch.testing.assert_close(masked_whiten(values, MASK), expected)
    scaled = torch.tensor([[1 / root, 2 / root, 0.0], [6 / root, 0.0, 0.0]])
    torch.testing.assert_close(masked_whiten(values, MASK, shift_mean=False), scaled)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_entries_change_neither_value_nor_gradient(name, garbage):
    values = torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]])
    clean_value, clean_gradient = value_and_gradient(REDUCTIONS[name], values, MASK)
    value, gradient = value_and_gradient(REDUCTIONS[name], values.masked_fill(~MASK, garbage), MASK)
    assert torch.equal(value, clean_value)
    assert torch.equal(gradient, clean_gradient)
    assert gradient[~MASK].eq(0).all() and gradient[MASK].ne(0).any()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_an_empty_mask_gives_a_finite_zero_that_can_be_back_propagated(name):
    """S14."""
    nothing = torch.zeros_like(MASK)
    value, gradient = value_and_gradient(REDUCTIONS[name], torch.full((2, 3), math.nan), nothing)
    assert value.eq(0).all() and gradient.eq(0).all()


@pytest.mark.parametrize("level", [0.0, 0.3, -7.1, -1e6 / 3])
def test_whitening_equal_entries_gives_exactly_0_and_a_finite_gradient(level):
    """A mean of equal float32 numbers is not always that number."""
    value, gradient = value_and_gradient(masked_whiten, torch.full((3, 11), level), torch.ones(3, 11) > 0)
    assert value.eq(0).all() and gradient.isfinite().all()


def test_scaling_equal_entries_leaves_them_as_they_are():
    values = torch.full((2, 3), 0.3)
    torch.testing.assert_close(masked_whiten(values, MASK, shift_mean=False), values.where(MASK, 0.0))


def test_only_rounding_noise_is_a_tie():
    """T03's convention: below 1e-6 * max(1, max|r|)."""
    spread = torch.tensor([0.0, 9e-7, 2e-6, 0.5, 2.0])
    largest = torch.tensor([0.3, 1.0, 1.0, 1e6, 1e6])
    assert is_tied(spread, largest).tolist() == [True, True, False, True, False]


@given(
    rows=st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6), min_size=1, max_size=5),
    extra=st.integers(0, 4),
)
def test_padding_columns_change_nothing(rows, extra):
    width = max(map(len, rows)) + extra
    values = torch.tensor([row + [math.nan] * (width - len(row)) for row in rows])
    mask = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
    flat = torch.tensor([value for row in rows for value in row])
    torch.testing.assert_close(masked_mean(values, mask), flat.mean(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(masked_variance(values, mask), flat.var(correction=0), rtol=1e-4, atol=1e-4)


SPLITS = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 2, 1, 0]], [[3, 0], [2], [1]]]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("unit, expected", [("token", 3.375), ("sequence", 2.5), ("constant", 1.35)])
def test_every_split_gives_the_same_loss_and_gradient(split, unit, expected):
    """T05: completions of 1, 2, 3 and 10 tokens with per-token losses 1, 2, 3 and 4; limit 10."""
    lengths = torch.tensor([1, 2, 3, 10])
    mask = torch.arange(10) < lengths[:, None]
    weights = torch.ones(4, 10, requires_grad=True)
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None] * weights
    numerator = {"token": masked_sum, "sequence": lambda v, m: masked_row_mean(v, m).sum(), "constant": masked_sum}
    denominator = {"token": 16, "sequence": 4, "constant": 40}[unit]
    parts = [numerator[unit](losses[rows], mask[rows]) / denominator for rows in split]
    total = torch.stack(parts).sum()
    total.backward()
    assert total.item() == pytest.approx(expected, abs=1e-6)
    share = mask / lengths[:, None] if unit == "sequence" else mask.float()
    torch.testing.assert_close(weights.grad, losses.detach() * share / denominator)
