"""Tokens drawn in half precision: how far from the trainer's policy they are is measured, and made up for."""

from __future__ import annotations

import math

import pytest
import torch

from quintain import GRPOTrainer, matmul
from quintain.policies.policies import corrected
from quintain.types import Rollouts

HALF = torch.bfloat16


def one_row(sampling: list[float], old: list[float] | None = None) -> Rollouts:
    ids = torch.zeros(1, len(sampling), dtype=torch.long)
    ones = torch.ones_like(ids, dtype=torch.bool)
    return Rollouts(
        prompt_ids=ids[:, :1],
        prompt_mask=ones[:, :1],
        completion_ids=ids,
        completion_mask=ones,
        stopped=ones[:, 0],
        sampling_logprobs=torch.tensor([sampling]),
        group_ids=ids[:, 0],
        prompts=[""],
        completions=[""],
        old_logprobs=None if old is None else torch.tensor([old]),
    )


def weights(logprobs: list[float], rollouts: Rollouts, cap: float = 2.0) -> list[float]:
    """The gradient of each corrected log-probability with respect to the plain one."""
    plain = torch.tensor([logprobs], requires_grad=True)
    ours = corrected(plain, rollouts, cap=cap)
    assert torch.equal(ours.detach(), plain.detach())
    ours.sum().backward()
    return plain.grad[0].tolist()


def test_a_gradient_is_weighted_by_the_trainers_probability_over_the_engines_up_to_the_cap():
    """ln 1.5, ln 0.5 and ln 4 above what the engine said: weights 1.5, 0.5, and 4 cut to 2."""
    rollouts = one_row([-1.0, -1.0, -2.0])
    logprobs = [-1.0 + math.log(1.5), -1.0 + math.log(0.5), -2.0 + math.log(4)]
    assert weights(logprobs, rollouts) == pytest.approx([1.5, 0.5, 2.0], abs=1e-6)


def test_the_weight_is_of_the_policy_that_sampled_and_not_of_the_policy_now():
    rollouts = one_row([-1.0], old=[-1.0 + math.log(1.25)])
    assert weights([-0.1], rollouts) == pytest.approx([1.25], abs=1e-6)


def test_where_the_engine_reported_nothing_the_weight_is_1():
    assert weights([-1.0], one_row([math.nan])) == [1.0]


@pytest.mark.parametrize(
    ("settings", "cap", "dtype"),
    [
        ({}, None, None),
        ({"dtype": "bfloat16"}, 2.0, HALF),
        ({"dtype": "bfloat16", "sampling_correction": 1.5}, 1.5, HALF),
        ({"dtype": "bfloat16", "sampling_correction": None}, None, HALF),
        ({"dtype": "bfloat16", "rollout_dtype": "float32"}, 2.0, None),
        ({"rollout_dtype": "bfloat16"}, 2.0, HALF),
    ],
)
def test_what_is_in_half_precision_is_corrected_and_nothing_else(settings, cap, dtype, make_trainer):
    trainer = make_trainer(GRPOTrainer, **settings)
    assert trainer.policies.sampling_correction == cap
    assert trainer.engine.dtype == dtype


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"rollout_dtype": "bfloat16"}])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_samples_in_half_precision_trains_and_reports_the_difference(
    settings, epochs, make_trainer, monkeypatch
):
    monkeypatch.setattr(matmul, "LEAST_WORK", 0)  # round the smallest layers too
    trainer = make_trainer(GRPOTrainer, max_steps=3, num_epochs=epochs, **settings)
    before = {name: value.detach().clone() for name, value in trainer.policies.parameters.items()}
    trainer.train()
    rows = trainer.run.state.log_history
    assert all(math.isfinite(row["loss"]) for row in rows[:3])
    assert all(0 < row["sampling_logprob_difference"] < 0.1 for row in rows[:3])
    assert any(not torch.equal(before[name], value) for name, value in trainer.policies.parameters.items())
