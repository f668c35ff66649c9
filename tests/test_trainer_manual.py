"""The manual way in: `generate` and `step` do what `train()` does."""

from __future__ import annotations

import pytest
import torch
from conftest import fraction_right

from quintain import GRPOTrainer, PPOTrainer, RewardError, log_training_stats


@pytest.mark.parametrize("trainer_class", [PPOTrainer, GRPOTrainer])
def test_stepping_by_hand_gives_the_numbers_and_weights_of_train(trainer_class, make_trainer):
    by_train = make_trainer(trainer_class, max_steps=1)
    by_train.train()
    by_hand = make_trainer(trainer_class, max_steps=1)
    rollouts = by_hand.generate_rollouts()
    queries = [ids[mask] for ids, mask in zip(rollouts.prompt_ids, rollouts.prompt_mask)]
    responses = [ids[mask] for ids, mask in zip(rollouts.completion_ids, rollouts.completion_mask)]
    scores = fraction_right(rollouts.completions, rollouts.columns["answer"])
    stats = by_hand.step(queries, responses, scores)
    row = by_train.run.state.log_history[0]
    for name in ("reward", "kl", "entropy", "loss", "grad_norm"):
        assert stats[name] == row[name], name
    assert stats["mean_reward"] == row["reward"]
    for name, parameter in by_train.policies.parameters.items():
        assert torch.equal(parameter, by_hand.policies.parameters[name]), name


def test_generate_returns_one_completion_a_query_with_its_stop_token(make_trainer):
    trainer = make_trainer(PPOTrainer)
    responses = trainer.generate(["01=", "1="], max_new_tokens=8, min_new_tokens=1, temperature=0.5)
    assert len(responses) == 2
    for response in responses:
        assert 1 <= len(response) <= 8
        assert len(response) == 8 or int(response[-1]) in trainer.sampling.stop_token_ids


def test_texts_and_ragged_token_lists_are_taken(make_trainer):
    trainer = make_trainer(PPOTrainer)
    stats = trainer.step(["01=", "1="], [[5, 4], torch.tensor([4])], [1.0, 0.0])
    assert {"step", "mean_reward", "kl", "clip_frac", "value_loss"} <= set(stats)
    assert stats["completions/mean_length"] == 1.5


@pytest.mark.parametrize("scores", [[1.0], [1.0, float("nan")]])
def test_scores_that_do_not_fit_are_refused(scores, make_trainer):
    with pytest.raises(RewardError, match="2 finite numbers"):
        make_trainer(PPOTrainer).step(["01=", "1="], [[5], [4]], scores)


def test_the_console_monitor_prints_the_five_numbers(capsys):
    """S62."""
    log_training_stats({"step": 3, "mean_reward": 0.5, "kl": 0.01, "clip_frac": 0.125, "value_loss": 0.25})
    line = "step 3  mean reward 0.5000  KL 0.01000  clip fraction 12.5%  value loss 0.2500"
    assert capsys.readouterr().out.strip() == line
