"""Target Policy Optimization: known answers (T03, T10), the identities of arXiv 2604.06159, tempering (S20)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintain.errors import ConfigError
from quintain.objectives.target_matching import (
    effective_group_size,
    group_softmax,
    standardised_scores,
    target_distribution,
    target_entropy,
    target_matching_loss,
    tempered_scale,
)

P, Q, S = [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0], [3.0, 1.0, 0.0, 0.0]
REWARDS = torch.tensor([*P, *Q, *S])
GROUPS = torch.arange(3).repeat_interleave(4)
ALL = torch.ones(12, dtype=torch.bool)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), atol=1e-6, rtol=0)


def target(rewards, old_logits, groups, scored, eta=1.0):
    scores = standardised_scores(rewards, groups, scored)
    return target_distribution(scores, old_logits, groups, scored, target_temperature=eta)


def loss_and_gradient(logits, q, groups, scored):
    logits = logits.clone().requires_grad_()
    losses = target_matching_loss(logits, q, groups, scored)
    losses.sum().backward()
    return losses.detach(), logits.grad


def random_groups(seed=0, rows=20):
    """Logits, rewards and ids of ragged, interleaved groups, some rows without score."""
    generator = torch.Generator().manual_seed(seed)
    logits, rewards = 5 * torch.randn(2, rows, generator=generator)
    groups = torch.randint(0, 5, (rows,), generator=generator) * 7 - 3
    return logits, rewards, groups, torch.rand(rows, generator=generator) < 0.8


def test_targets_and_losses_of_three_groups_with_uniform_old_weights():
    """T03."""
    q = target(REWARDS, torch.zeros(12), GROUPS, ALL)
    close(q, [0.25] * 4 + [0.076521] * 3 + [0.770438] + [0.730984, 0.142793, 0.063111, 0.063111])
    losses, gradient = loss_and_gradient(torch.zeros(12), q, GROUPS, ALL)
    close(losses, [1.386294] * 3)
    close(gradient, (0.25 - q).tolist())


def test_one_success_among_ten_has_score_3():
    """The paper's example: u = (3, -1/3, ..., -1/3)."""
    rewards = torch.eye(10)[0]
    scores = standardised_scores(rewards, torch.zeros(10, dtype=torch.long), ALL[:10])
    close(scores, [3.0] + [-1 / 3] * 9)


def test_a_high_target_temperature_stays_at_the_old_weights_and_a_low_one_picks_the_best():
    old = torch.tensor([0.1, -2.0, 0.5, 0.0])
    cool, warm = (target(torch.tensor(S), old, GROUPS[:4], ALL[:4], eta=eta) for eta in (1e-3, 1e6))
    close(cool, [1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(warm, old.softmax(dim=0), atol=1e-5, rtol=0)


def test_the_target_sums_to_1_over_the_scored_rows_of_each_group():
    """T10: over the three scored rows only."""
    rewards, scored = torch.tensor([0.7, math.nan, 1.0, 0.3]), torch.tensor([True, False, True, True])
    old = torch.tensor([0.0, math.nan, 0.0, 0.0])
    q = target(rewards, old, GROUPS[:4], scored)
    u = (torch.tensor([0.7, 1.0, 0.3]) - 2 / 3) / torch.tensor([0.7, 1.0, 0.3]).std(correction=0)
    assert q[1] == 0
    torch.testing.assert_close(q[scored], u.softmax(dim=0))


def test_the_gradient_is_p_minus_q():
    logits, rewards, groups, scored = random_groups()
    q = target(rewards, torch.zeros_like(logits), groups, scored)
    losses, gradient = loss_and_gradient(logits, q, groups, scored)
    torch.testing.assert_close(gradient, group_softmax(logits, groups, scored) - q)

    # The same from first principles, differentiating the cross-entropy of one group at a time.
    for position, group in enumerate(groups.unique().tolist()):
        members = (groups == group) & scored
        leaf = logits[members].clone().requires_grad_()
        cross_entropy = -(q[members] * leaf.log_softmax(dim=0)).sum()
        cross_entropy.backward()
        torch.testing.assert_close(losses[position], cross_entropy.detach())
        torch.testing.assert_close(gradient[members], leaf.grad, atol=1e-6, rtol=1e-5)


def test_finite_differences_of_the_loss_agree_with_its_gradient():
    logits, rewards, groups, scored = random_groups(rows=8)
    q = target(rewards.double(), torch.zeros(8, dtype=torch.float64), groups, scored)
    leaf = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: target_matching_loss(x, q, groups, scored), (leaf,))


def test_the_gradient_vanishes_on_the_target():
    """The target of a policy is reached at its logits plus the scores, plus any constant of the group's own."""
    logits, rewards, groups, scored = random_groups()
    q = target(rewards, logits, groups, scored)
    _, untrained = loss_and_gradient(logits, q, groups, scored)
    fitted = logits + standardised_scores(rewards, groups, scored) + groups / 8
    _, gradient = loss_and_gradient(fitted, q, groups, scored)
    assert untrained.abs().max() > 0.1 and gradient.abs().max() < 1e-6


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8])
def test_the_first_gradient_of_a_tied_group_is_exactly_zero(size):
    """T03. Not merely small: Adam divides by the size of the gradient."""
    logits = -30 * torch.rand(size, generator=torch.Generator().manual_seed(size))
    groups, scored = torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool)
    q = target(torch.full((size,), 0.3), logits, groups, scored)
    _, gradient = loss_and_gradient(logits, q, groups, scored)
    assert gradient.tolist() == [0.0] * size
    assert torch.equal(q, group_softmax(logits, groups, scored))


def test_rounding_noise_is_not_signal_and_a_small_difference_is():
    """T03."""
    near = target(torch.tensor([0.3, 0.3, 0.3000001, 0.3]), torch.zeros(4), GROUPS[:4], ALL[:4])
    torch.testing.assert_close(near, torch.full((4,), 0.25), atol=0.01, rtol=0)
    real = target(torch.tensor([0.0, 0.0, 0.0, 0.001]), torch.zeros(4), GROUPS[:4], ALL[:4])
    close(real, [0.076521] * 3 + [0.770438])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_rows_without_score_change_neither_value_nor_gradient(garbage):
    logits, rewards, groups, scored = random_groups()

    def run(fill):
        dirty_logits, dirty_rewards = logits.masked_fill(~scored, fill), rewards.masked_fill(~scored, fill)
        q = target(dirty_rewards, dirty_logits, groups, scored)
        scale = tempered_scale(dirty_logits, groups, scored, min_effective_group=2.0, group_size=6)
        return (q, scale, *loss_and_gradient(dirty_logits + 1.0 * groups, q.masked_fill(~scored, fill), groups, scored))

    for clean, dirty in zip(run(0.0), run(garbage), strict=True):
        assert torch.equal(clean, dirty)


def test_a_batch_without_scores_has_a_zero_loss_that_can_be_back_propagated():
    """S14."""
    nothing = torch.zeros_like(ALL)
    nan = torch.full((12,), math.nan)
    losses, gradient = loss_and_gradient(nan, nan, GROUPS, nothing)
    assert losses.tolist() == [0.0] * 3 and gradient.eq(0).all()


def test_logits_of_long_completions_do_not_overflow():
    """S28."""
    logits = torch.tensor([-9e3, -1e4, -2e3, -5e3])
    q = target(torch.tensor(S), logits, GROUPS[:4], ALL[:4])
    losses, gradient = loss_and_gradient(logits[[3, 0, 1, 2]], q, GROUPS[:4], ALL[:4])
    assert q.isfinite().all() and losses.isfinite().all() and gradient.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(20)), seed=st.integers(0, 100))
def test_shuffling_rows_permutes_targets_and_gradients_and_keeps_losses(order, seed):
    """T03."""
    logits, rewards, groups, scored = random_groups(seed)
    q = target(rewards, logits, groups, scored)
    losses, gradient = loss_and_gradient(-logits, q, groups, scored)
    scale = tempered_scale(logits, groups, scored, min_effective_group=2.0, group_size=10)

    def at(x):
        return x[order]

    shuffled = target(at(rewards), at(logits), at(groups), at(scored))
    torch.testing.assert_close(shuffled, at(q), atol=1e-6, rtol=0)
    again, permuted = loss_and_gradient(at(-logits), shuffled, at(groups), at(scored))
    torch.testing.assert_close(again, losses, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(permuted, at(gradient), atol=1e-5, rtol=0)
    rescaled = tempered_scale(at(logits), at(groups), at(scored), min_effective_group=2.0, group_size=10)
    torch.testing.assert_close(rescaled, at(scale), atol=1e-5, rtol=0)


def test_effective_size_and_entropy():
    weights = torch.tensor([0.25, 0.25, 0.25, 0.25, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0])
    close(effective_group_size(weights, GROUPS, ALL), [4.0, 1.0, 2.0])
    close(target_entropy(weights, GROUPS, ALL), [math.log(4), 0.0, math.log(2)])
    nothing = torch.zeros_like(ALL)
    assert effective_group_size(weights, GROUPS, nothing).tolist() == [0.0] * 3
    assert target_entropy(weights, GROUPS, nothing).tolist() == [0.0] * 3


def test_a_group_that_is_broad_enough_is_left_alone():
    logits = torch.tensor([0.0, 0.1, -0.1, 0.2] + [-50.0] * 4 + [0.0, 0.0, -1e3, -1e3])
    scale = tempered_scale(logits, GROUPS, ALL, min_effective_group=2.0, group_size=4)
    assert scale.tolist() == [1.0] * 12
    scale = tempered_scale(logits.double(), GROUPS, ALL, min_effective_group=2.0, group_size=4)
    assert scale.tolist() == [1.0] * 12


def test_a_group_that_meets_the_bound_exactly_is_left_alone():
    """Three equal weights have size 3 less rounding; a fourth must not be drawn in to make up for it."""
    logits = torch.tensor([0.0, 0.0, 0.0, -1e3])
    scale = tempered_scale(logits, GROUPS[:4], ALL[:4], min_effective_group=3.0, group_size=4)
    assert scale.tolist() == [1.0] * 4


@pytest.mark.parametrize("spread", [3.0, 100.0, 5000.0])
@pytest.mark.parametrize("wanted", [2.0, 4.0, 7.5])
def test_a_concentrated_group_is_tempered_to_the_wanted_size_and_no_further(spread, wanted):
    logits = -spread * torch.linspace(0, 1, 8).square()
    groups, scored = torch.zeros(8, dtype=torch.long), torch.ones(8, dtype=torch.bool)
    before = effective_group_size(group_softmax(logits, groups, scored), groups, scored)
    scale = tempered_scale(logits, groups, scored, min_effective_group=wanted, group_size=8)
    size = effective_group_size(group_softmax(scale * logits, groups, scored), groups, scored)
    if before >= wanted:
        assert scale.eq(1).all()
    else:
        assert size.item() == pytest.approx(wanted, abs=1e-3) and scale.gt(0).all() and scale.lt(1).all()


def test_a_group_with_fewer_scored_rows_keeps_the_same_share_of_them():
    logits = torch.tensor([0.0, -40.0, -90.0, -200.0, math.nan, math.nan, math.nan, math.nan])
    groups, scored = torch.zeros(8, dtype=torch.long), torch.tensor([True] * 4 + [False] * 4)
    scale = tempered_scale(logits, groups, scored, min_effective_group=4.0, group_size=8)
    size = effective_group_size(group_softmax(scale * logits, groups, scored), groups, scored)
    assert size.item() == pytest.approx(2, abs=1e-3)


def test_half_of_a_pair_is_always_reached():
    scale = tempered_scale(torch.tensor([0.0, -900.0]), GROUPS[:2], ALL[:2], min_effective_group=1.0, group_size=2)
    assert scale.tolist() == [1.0, 1.0]


def test_target_and_scale_carry_no_gradient():
    logits = torch.randn(12, requires_grad=True)
    assert not target(REWARDS, logits, GROUPS, ALL).requires_grad
    assert not tempered_scale(logits, GROUPS, ALL, min_effective_group=2.0, group_size=4).requires_grad


@pytest.mark.parametrize("wanted", [0.5, 4.0, 5.0])
def test_an_effective_size_that_no_group_can_have_is_refused(wanted):
    with pytest.raises(ConfigError, match=rf"min_effective_group .* got {wanted}\. Usual: 2"):
        tempered_scale(torch.zeros(12), GROUPS, ALL, min_effective_group=wanted, group_size=4)


@pytest.mark.parametrize("eta", [0.0, -1.0, math.nan])
def test_a_target_temperature_that_is_not_above_0_is_refused(eta):
    with pytest.raises(ConfigError, match=r"target_temperature .* must be above 0: got"):
        target(REWARDS, torch.zeros(12), GROUPS, ALL, eta=eta)
