"""Log-probabilities and values kept while sampling stand for a pass over the completions, where they are the same."""

from __future__ import annotations

import pytest
import torch

from quintain import GRPOTrainer, PPOTrainer, TPOTrainer

REUSED = {"num_epochs": 2, "max_steps": 2, "min_completion_length": 0, "max_completion_length": 4}
PAPER = {"group_logits": "logprob", "use_target_policy": False, "beta": 0.0}


def moved(trainer):
    """The trainer after its first update: before it, everything is computed afresh."""
    trainer.run_step()
    return trainer


def rows_evaluated(trainer, rollouts):
    """The annotated rollouts, and how many rows each forward pass of the annotation had."""
    rows = []
    handle = trainer.policies.module.language_model.register_forward_hook(
        lambda _module, _args, kwargs, _output: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    annotated = trainer.policies.annotate(rollouts, old=trainer.records_old_logprobs, keep=trainer.unit)
    handle.remove()
    return annotated, rows


@pytest.mark.parametrize(
    ("trainer_class", "settings"), [(GRPOTrainer, {}), (TPOTrainer, PAPER), (PPOTrainer, {"kl_coef": 0.0})]
)
def test_after_the_first_update_only_one_completion_is_computed_again(trainer_class, settings, make_trainer):
    trainer = moved(make_trainer(trainer_class, **REUSED, **settings))
    rollouts = trainer.generate_rollouts()
    annotated, passes = rows_evaluated(trainer, rollouts)
    first = rollouts.select([0])
    assert passes == [int(first.prompt_mask.sum() + first.lengths.sum()) - 1]
    assert torch.equal(annotated.old_logprobs, rollouts.sampling_logprobs)


def test_before_the_first_update_everything_is_computed_afresh(make_trainer):
    """So that KL to the reference is exactly 0 there."""
    trainer = make_trainer(GRPOTrainer, **REUSED)
    rollouts = trainer.generate_rollouts()
    annotated, passes = rows_evaluated(trainer, rollouts)
    first = rollouts.select([0])
    assert sum(passes) > int(first.prompt_mask.sum() + first.lengths.sum())
    torch.testing.assert_close(annotated.old_logprobs, rollouts.sampling_logprobs, atol=1e-5, rtol=0)


def test_log_probabilities_that_the_trainer_does_not_confirm_are_computed_again(make_trainer):
    trainer = moved(make_trainer(GRPOTrainer, **REUSED))
    rollouts = trainer.generate_rollouts()
    off = rollouts.replace(
        sampling_logprobs=torch.where(rollouts.completion_mask, rollouts.sampling_logprobs - 1e-3, 0)
    )
    annotated, _ = rows_evaluated(trainer, off)
    torch.testing.assert_close(annotated.old_logprobs, rollouts.sampling_logprobs, atol=1e-5, rtol=0)


def test_values_are_those_of_a_pass_over_the_completions(make_trainer):
    trainer = make_trainer(PPOTrainer, **REUSED)
    torch.nn.init.normal_(trainer.policies.module.value_model.score.weight)
    moved(trainer)
    rollouts = trainer.generate_rollouts()
    assert float(rollouts.values.abs().max()) > 0.1
    with torch.no_grad():
        torch.testing.assert_close(rollouts.values, trainer.policies.module.values(rollouts), atol=1e-5, rtol=1e-4)


def test_values_are_computed_again_with_log_probabilities_that_are_not_confirmed(make_trainer):
    trainer = make_trainer(PPOTrainer, **REUSED)
    torch.nn.init.normal_(trainer.policies.module.value_model.score.weight)
    moved(trainer)
    rollouts = trainer.generate_rollouts()
    off = rollouts.replace(sampling_logprobs=rollouts.sampling_logprobs - 1e-3, values=rollouts.values + 1.0)
    annotated, _ = rows_evaluated(trainer, off)
    torch.testing.assert_close(annotated.values, rollouts.values, atol=1e-5, rtol=1e-4)


def test_a_critic_of_its_own_is_asked_afterwards(make_trainer):
    trainer = moved(make_trainer(PPOTrainer, value_model="separate", **REUSED))
    rollouts = trainer.generate_rollouts()
    assert rollouts.values is None
    assert rows_evaluated(trainer, rollouts)[0].values is not None
