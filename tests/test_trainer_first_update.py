"""The first update of a rollout is on-policy, or the run stops (T06)."""

from __future__ import annotations

import pytest
import torch
from first_update_rollouts import scored_rollouts, trainer_on_gpt2

from quintain import ConfigError, GRPOConfig, GRPOTrainer, RolloutError


@pytest.fixture
def trainer(tmp_path):
    return trainer_on_gpt2(GRPOTrainer, tmp_path)


def test_first_update_has_ratio_one_and_the_second_has_not(trainer):
    ratios = []
    original = trainer.loss

    def watched(outputs, micro):
        ratios.append((outputs.logprobs - micro.old_logprobs).detach().exp()[micro.loss_mask])
        return original(outputs, micro)

    trainer.loss = watched
    trainer.fit(scored_rollouts(trainer))
    assert (ratios[0] - 1).abs().max() <= 1e-5
    assert (ratios[-1] - 1).abs().max() > 1e-4


def test_sampler_and_trainer_agree_about_the_sampled_tokens(trainer):
    rollouts = scored_rollouts(trainer)
    annotated = trainer.policies.annotate(rollouts, old=True)
    gap = (annotated.old_logprobs - rollouts.sampling_logprobs)[rollouts.completion_mask].abs().max()
    assert gap <= 1e-4


def test_each_row_scores_as_it_does_alone_without_padding(trainer):
    rollouts = scored_rollouts(trainer)
    together = trainer.policies.online(rollouts).logprobs
    for row in range(len(rollouts)):
        alone = trainer.policies.online(rollouts.select([row])).logprobs[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.142932), (1.0, -0.407606), (2.0, -0.680270)])
def test_logprobs_are_those_of_the_tempered_softmax(temperature, expected):
    from quintain.policies.head import outputs_of_logits

    logprob = outputs_of_logits(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature=temperature).logprobs
    assert logprob.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        GRPOConfig(temperature=temperature)


def test_doubled_old_logprobs_stop_the_run_before_any_weight_moves(trainer, monkeypatch):
    original = trainer.policies.annotate

    def doubled(rollouts, **arguments):
        rollouts = original(rollouts, **arguments)
        return rollouts.replace(old_logprobs=2 * rollouts.old_logprobs)

    monkeypatch.setattr(trainer.policies, "annotate", doubled)
    before = [value.clone() for value in trainer.policies.parameters.values()]
    with pytest.raises(RolloutError, match=r"on-policy.*old_logprobs.*No weight was changed"):
        trainer.fit(scored_rollouts(trainer))
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.policies.parameters.values()))


def test_rollouts_of_an_older_policy_are_corrected_by_their_ratio_instead(trainer):
    """S17: with the sampling log-probabilities given, the first ratio is online over sampling, not 1."""
    ratios = []
    original = trainer.loss

    def watched(outputs, micro):
        ratios.append((outputs.logprobs - micro.old_logprobs).detach().exp()[micro.loss_mask])
        return original(outputs, micro)

    trainer.loss = watched
    rollouts = scored_rollouts(trainer)
    queries = [ids[mask] for ids, mask in zip(rollouts.prompt_ids, rollouts.prompt_mask)]
    responses = [ids[mask] for ids, mask in zip(rollouts.completion_ids, rollouts.completion_mask)]
    older = [(values[mask] - 0.1) for values, mask in zip(rollouts.sampling_logprobs, rollouts.completion_mask)]
    trainer.step(queries, responses, rollouts.rewards, sampling_logprobs=older)
    torch.testing.assert_close(ratios[0], torch.full_like(ratios[0], 0.1).exp(), atol=1e-3, rtol=0)


def test_a_sampler_with_other_weights_is_found_out(trainer):
    rollouts = scored_rollouts(trainer)
    wrong = rollouts.replace(sampling_logprobs=rollouts.sampling_logprobs - 1.0)
    with pytest.raises(RolloutError, match=r"sampling_logprobs.*native"):
        trainer.fit(wrong)
