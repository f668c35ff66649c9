"""Each algorithm's formulas put together on a bandit with two arms: exact gradients on the policy's logits (T01).

The policy is a pair of free logits, the two completions are one token each, and they earned 1 and 0.
"""

from __future__ import annotations

import pytest
import torch

from quintain.advantages.gae import gae
from quintain.advantages.group import batch_baseline, group_relative, leave_one_out
from quintain.masking import masked_mean, masked_row_sum
from quintain.objectives.clip import (
    cispo,
    clipped_surrogate,
    clipped_surrogate_from_ratio,
    sequence_ratio,
    summed_sequence_ratio,
)
from quintain.objectives.score_function import delight_loss, score_function_loss
from quintain.objectives.target_kl import ema_kl_loss
from quintain.objectives.target_matching import standardised_scores, target_distribution, target_matching_loss

REWARDS = torch.tensor([1.0, 0.0])
GROUPS = torch.zeros(2, dtype=torch.long)
SCORED = torch.ones(2, dtype=torch.bool)
MASK = torch.ones(2, 1, dtype=torch.bool)


def policy(*logits):
    """The free logits, and the log-probability of each of the two completions: [batch, completion]."""
    z = torch.tensor(logits, requires_grad=True)
    return z, z.log_softmax(dim=0)[:, None]


def check(loss, z, *, value, gradient):
    loss.backward()
    assert loss.item() == pytest.approx(value, abs=1e-6)
    assert z.grad.tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("correction, gradient", [(1, (-0.353553, 0.353553)), (0, (-0.5, 0.5))])
def test_grpo_shows_loss_0_and_has_a_gradient(correction, gradient):
    z, logprobs = policy(0.0, 0.0)
    advantages = group_relative(REWARDS, GROUPS, SCORED, correction=correction)[:, None]
    losses = clipped_surrogate(logprobs, logprobs.detach(), advantages, clip_range=0.2)
    check(masked_mean(losses, MASK), z, value=0, gradient=gradient)


def test_grpo_with_sequence_ratios_agrees_on_completions_of_one_token():
    z, logprobs = policy(0.0, 0.0)
    ratio = sequence_ratio(logprobs, logprobs.detach(), MASK)
    losses = clipped_surrogate_from_ratio(ratio, group_relative(REWARDS, GROUPS, SCORED)[:, None], clip_range=0.2)
    check(masked_mean(losses, MASK), z, value=0, gradient=(-0.353553, 0.353553))


def test_cispo_has_the_plain_policy_gradient_on_policy():
    z, logprobs = policy(0.0, 0.0)
    advantages = group_relative(REWARDS, GROUPS, SCORED)[:, None]
    losses = cispo(logprobs, logprobs.detach(), advantages, clip_high=5.0)
    check(masked_mean(losses, MASK), z, value=0, gradient=(-0.353553, 0.353553))


def test_rloo_shows_loss_0_and_has_a_gradient():
    z, logprobs = policy(0.0, 0.0)
    ratio = summed_sequence_ratio(logprobs, logprobs.detach(), MASK)
    losses = clipped_surrogate_from_ratio(ratio, leave_one_out(REWARDS, GROUPS, SCORED), clip_range=0.2)
    check(losses.mean(), z, value=0, gradient=(-0.5, 0.5))


def test_ppo_with_a_critic_that_knows_nothing():
    z, logprobs = policy(0.0, 0.0)
    advantages, returns = gae(REWARDS[:, None], torch.zeros(2, 1), MASK, gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [[1.0], [0.0]]
    losses = clipped_surrogate(logprobs, logprobs.detach(), advantages, clip_range=0.2)
    check(masked_mean(losses, MASK), z, value=-0.5, gradient=(-0.25, 0.25))


def test_reinforce():
    z, logprobs = policy(0.0, 0.0)
    losses = score_function_loss(logprobs, batch_baseline(REWARDS, SCORED)[:, None])
    check(masked_mean(losses, MASK), z, value=0, gradient=(-0.25, 0.25))


def test_delight_gates_of_opposite_advantages_add_up_to_1():
    """Gates 1 / (1 + 2^-0.5) = 0.585786 and 0.414214: together half of what REINFORCE does."""
    z, logprobs = policy(0.0, 0.0)
    losses = delight_loss(logprobs, batch_baseline(REWARDS, SCORED)[:, None], delight_temperature=1.0)
    value = 0.693147 * 0.5 * (0.585786 - 0.414214) / 2
    check(masked_mean(losses, MASK), z, value=value, gradient=(-0.125, 0.125))


def test_policy_gradient_with_the_target_kl():
    """The KL's own gradient is 0 while online and target agree."""
    z, logprobs = policy(0.0, 0.0)
    advantages = group_relative(REWARDS, GROUPS, SCORED)[:, None]
    loss = ema_kl_loss(logprobs, logprobs.detach(), advantages, MASK, kl_coef=0.04, estimator=lambda x: x.square() / 2)
    check(loss, z, value=0, gradient=(-0.353553, 0.353553))


def target(*old_logprobs):
    scores = standardised_scores(REWARDS, GROUPS, SCORED)
    assert scores.tolist() == [1.0, -1.0]
    return target_distribution(scores, torch.tensor(old_logprobs), GROUPS, SCORED, target_temperature=1.0)


def test_target_matching_from_equal_old_weights():
    z, logprobs = policy(0.0, 0.0)
    q = target(-0.693147, -0.693147)
    assert q.tolist() == pytest.approx([0.880797, 0.119203], abs=1e-6)
    (loss,) = target_matching_loss(masked_row_sum(logprobs, MASK), q, GROUPS, SCORED)
    check(loss, z, value=0.693147, gradient=(-0.380797, 0.380797))


def test_target_matching_in_the_second_epoch_keeps_its_target():
    z, logprobs = policy(1.0, 0.0)
    (loss,) = target_matching_loss(masked_row_sum(logprobs, MASK), target(-0.693147, -0.693147), GROUPS, SCORED)
    check(loss, z, value=0.432465, gradient=(-0.149738, 0.149738))


def test_the_target_is_tilted_from_the_old_weights():
    old = torch.tensor([0.8, 0.2]).log().tolist()
    assert target(*old).tolist() == pytest.approx([0.967273, 0.032727], abs=1e-6)
