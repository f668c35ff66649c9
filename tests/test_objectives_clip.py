"""Clipped surrogate and its relatives, against NumPy and by hand (S48, S49, S52, S53, W4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quintain.errors import ConfigError
from quintain.masking import masked_row_mean, masked_sum, zero_masked
from quintain.objectives.clip import (
    cispo,
    clipped_surrogate,
    clipped_surrogate_from_ratio,
    clipped_tokens,
    clipped_value_loss,
    probability_ratio,
    sequence_ratio,
    summed_sequence_ratio,
)

MASK = torch.tensor([[True, True, False], [True, False, False]])


def random_batch(seed=0, rows=20, width=30):
    """Log-probabilities whose ratios lie on both sides of every bound, with advantages of both signs and 0."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=generator)
    logprobs = old + torch.randn(rows, width, generator=generator)
    advantages = torch.randn(rows, width, generator=generator)
    advantages[0] = 0
    return logprobs, old, advantages


def gradient_on_ratio(ratio, advantage, **bounds):
    ratio = torch.tensor([ratio], requires_grad=True)
    clipped_surrogate_from_ratio(ratio, torch.tensor([advantage]), **bounds).sum().backward()
    return ratio.grad.item()


@pytest.mark.parametrize("low, high", [(0.2, None), (0.2, 0.28), (0.5, 3.0)])
def test_clipped_surrogate_agrees_with_numpy(low, high):
    logprobs, old, advantages = random_batch()
    loss = clipped_surrogate(logprobs, old, advantages, clip_range=low, clip_range_high=high)
    ratio = np.exp(logprobs.numpy() - old.numpy())
    clipped = np.clip(ratio, 1 - low, 1 + (high or low))
    expected = -np.minimum(ratio * advantages.numpy(), clipped * advantages.numpy())
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_dual_clip_agrees_with_numpy_and_with_capping_the_ratio():
    logprobs, old, advantages = random_batch()
    loss = clipped_surrogate(logprobs, old, advantages, clip_range=0.2, dual_clip=2.0).numpy()
    ratio, a = np.exp(logprobs.numpy() - old.numpy()), advantages.numpy()
    pessimistic = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    np.testing.assert_allclose(
        loss, -np.where(a < 0, np.maximum(pessimistic, 2.0 * a), pessimistic), rtol=1e-5, atol=1e-6
    )
    two_sided = -np.minimum(np.minimum(ratio, 2.0) * a, np.clip(ratio, 0.8, 1.2) * a)
    np.testing.assert_allclose(loss, two_sided, rtol=1e-5, atol=1e-6)
    assert ((ratio > 2) & (a < 0)).any()


def test_on_policy_the_gradient_is_the_plain_policy_gradient():
    logprobs, _, advantages = random_batch()
    logprobs.requires_grad_()
    clipped_surrogate(logprobs, logprobs.detach(), advantages, clip_range=0.2).sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


def test_gradient_is_zero_beyond_the_clip_range():
    assert gradient_on_ratio(1.21, 2.0, clip_range=0.2) == 0
    assert gradient_on_ratio(0.79, -2.0, clip_range=0.2) == 0


def test_gradient_remains_where_the_advantage_pulls_the_ratio_back():
    assert gradient_on_ratio(1.21, -2.0, clip_range=0.2) == 2
    assert gradient_on_ratio(0.79, 2.0, clip_range=0.2) == -2


def test_the_upper_bound_moves_alone():
    assert gradient_on_ratio(1.25, 2.0, clip_range=0.2, clip_range_high=0.28) == -2
    assert gradient_on_ratio(1.29, 2.0, clip_range=0.2, clip_range_high=0.28) == 0
    assert gradient_on_ratio(0.79, -2.0, clip_range=0.2, clip_range_high=0.28) == 0


def test_dual_clip_bounds_negative_advantages_only():
    assert gradient_on_ratio(2.9, -2.0, clip_range=0.2, dual_clip=3.0) == 2
    assert gradient_on_ratio(3.1, -2.0, clip_range=0.2, dual_clip=3.0) == 0
    far = clipped_surrogate_from_ratio(torch.tensor([50.0]), torch.tensor([-2.0]), clip_range=0.2, dual_clip=3.0)
    assert far.item() == 6


@pytest.mark.parametrize("bounds", [{}, {"clip_range_high": 0.5}, {"dual_clip": 1.7}])
def test_clipped_tokens_are_those_without_gradient(bounds):
    logprobs, old, advantages = random_batch()
    ratio = (logprobs - old).exp().requires_grad_()
    clipped_surrogate_from_ratio(ratio, advantages, clip_range=0.2, **bounds).sum().backward()
    clipped = clipped_tokens(ratio, advantages, clip_range=0.2, **bounds)
    assert torch.equal(clipped[advantages != 0], ratio.grad[advantages != 0] == 0)
    assert not clipped[advantages == 0].any() and clipped.any() and not clipped.all()


@pytest.mark.parametrize("distance", [100.0, 1e4, -100.0, -1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_policies_far_apart_give_finite_losses_and_gradients(distance, advantage):
    """exp overflows float32 at 88 nats, and 0 * inf is NaN."""
    logprobs = torch.tensor([[distance]], requires_grad=True)
    zero, advantages = torch.zeros(1, 1), torch.tensor([[advantage]])
    one = torch.ones(1, 1, dtype=torch.bool)
    summed = summed_sequence_ratio(logprobs, zero, one)
    losses = (
        clipped_surrogate(logprobs, zero, advantages, clip_range=0.2),
        clipped_surrogate_from_ratio(sequence_ratio(logprobs, zero, one), advantages, clip_range=0.2),
        clipped_surrogate_from_ratio(summed, advantages[:, 0], clip_range=0.2),
        cispo(logprobs, zero, advantages, clip_high=5.0),
    )
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert loss.isfinite().all() and gradient.isfinite().all()


def test_a_nan_is_not_hidden_by_the_bound_on_the_ratio():
    assert probability_ratio(torch.tensor([math.nan])).isnan().all()


def test_sequence_ratio_is_the_geometric_mean_on_every_token():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, math.nan, math.nan]])
    old = torch.tensor([[-1.2, -2.4, math.nan], [-0.5, math.nan, math.nan]])
    expected = torch.tensor([0.3, -0.5]).exp()[:, None].expand(2, 3)
    torch.testing.assert_close(sequence_ratio(logprobs, old, MASK), expected)


def test_summed_sequence_ratio_is_that_of_the_whole_completion():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, math.nan, math.nan]])
    old = torch.tensor([[-1.2, -2.4, math.nan], [-0.5, math.nan, math.nan]])
    torch.testing.assert_close(summed_sequence_ratio(logprobs, old, MASK), torch.tensor([0.6, -0.5]).exp())


def test_sequence_ratio_spreads_its_gradient_over_the_tokens_of_the_sequence():
    """GSPO: the mean over tokens of a sequence's loss has gradient -A * ratio / length on each of its log-probs."""
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, math.nan, math.nan]], requires_grad=True)
    old = torch.tensor([[-1.01, -2.05, math.nan], [-1.1, math.nan, math.nan]])
    advantages = torch.tensor([[2.0] * 3, [-3.0] * 3])
    losses = clipped_surrogate_from_ratio(sequence_ratio(logprobs, old, MASK), advantages, clip_range=0.2)
    masked_row_mean(losses, MASK).sum().backward()
    ratio = [math.exp(0.03), math.exp(0.1)]
    expected = torch.tensor([[-2 * ratio[0] / 2, -2 * ratio[0] / 2, 0.0], [3 * ratio[1], 0.0, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected)


def test_cispo_keeps_a_gradient_on_every_token_and_bounds_its_weight():
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    old = logprobs.detach() - torch.tensor([[0.5, 1.5, 3.0]]).log()
    advantages = torch.tensor([[1.0, -2.0, 1.0]])
    loss = cispo(logprobs, old, advantages, clip_high=2.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([[0.5, -3.0, 2.0]]))
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5, 3.0, -2.0]]))


def test_clipped_value_loss_agrees_with_numpy():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 200, generator=generator)
    clipped = np.clip(values.numpy(), old.numpy() - 0.2, old.numpy() + 0.2)
    expected = 0.5 * np.maximum((values.numpy() - returns.numpy()) ** 2, (clipped - returns.numpy()) ** 2)
    loss = clipped_value_loss(values, old, returns, clip_range=0.2)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "value, loss, gradient",
    [
        (0.1, 0.405, -0.9),  # within the range: plain squared error
        (0.5, 0.32, 0.0),  # a move towards the return counts up to 0.2 and no further
        (-0.5, 1.125, -1.5),  # a move away from it counts in full
    ],
)
def test_clipped_value_loss_by_hand(value, loss, gradient):
    values = torch.tensor([value], requires_grad=True)
    result = clipped_value_loss(values, torch.zeros(1), torch.ones(1), clip_range=0.2)
    result.sum().backward()
    assert result.item() == pytest.approx(loss) and values.grad.item() == pytest.approx(gradient)


PER_TOKEN = {
    "clipped_surrogate": lambda a, b, c: clipped_surrogate(a, b, c, clip_range=0.2, dual_clip=3.0),
    "cispo": lambda a, b, c: cispo(a, b, c, clip_high=5.0),
    "clipped_value_loss": lambda a, b, c: clipped_value_loss(a, b, c, clip_range=0.2),
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_padding_behind_zero_masked_changes_neither_value_nor_gradient(name):
    inputs = [tensor[:2, :3] for tensor in random_batch(seed=1)]

    def run(padding):
        first, *others = (tensor.masked_fill(~MASK, padding) for tensor in inputs)
        first.requires_grad_()
        loss = PER_TOKEN[name](*(zero_masked(tensor, MASK) for tensor in (first, *others)))
        masked_sum(loss, MASK).backward()
        return loss[MASK], first.grad

    for clean, dirty in zip(run(0.0), run(math.nan), strict=True):
        assert torch.equal(clean, dirty)


def test_losses_are_per_token_for_flat_tensors_too():
    inputs = random_batch()
    for loss in PER_TOKEN.values():
        flat = loss(*(tensor.flatten() for tensor in inputs))
        assert torch.equal(flat, loss(*inputs).flatten())


@pytest.mark.parametrize(
    "bounds, message",
    [
        ({"clip_range": 0.0}, r"clip_range must be in \(0, 1\): got 0.0"),
        ({"clip_range": 1.0}, r"clip_range must be in \(0, 1\): got 1.0"),
        ({"clip_range": 0.2, "clip_range_high": 0.0}, r"clip_range_high must be above 0: got 0.0"),
        ({"clip_range": 0.2, "clip_range_high": 0.5, "dual_clip": 1.5}, r"must exceed 1 \+ clip_range_high = 1.5"),
    ],
)
def test_bounds_outside_their_range_are_refused(bounds, message):
    one = torch.ones(1)
    with pytest.raises(ConfigError, match=message):
        clipped_surrogate(one, one, one, **bounds)
    with pytest.raises(ConfigError, match=message):
        clipped_tokens(one, one, **bounds)


def test_other_bounds_outside_their_range_are_refused():
    one = torch.ones(1)
    with pytest.raises(ConfigError, match="got 0"):
        clipped_value_loss(one, one, one, clip_range=0.0)
    with pytest.raises(ConfigError, match="got 0"):
        cispo(one, one, one, clip_high=0.0)
