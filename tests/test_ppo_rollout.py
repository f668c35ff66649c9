"""PPO's rollout: sampling at a temperature, between two lengths, and what is recorded of every token."""

from __future__ import annotations

import copy

import pytest
import torch
from first_update_rollouts import scored_rollouts, trainer_on_gpt2

from quintain import PPOConfig, PPOTrainer, RolloutError
from quintain.policies.loading import load_model

ZERO = 4
"""The token "0" of a tokenizer for "01="."""


@pytest.fixture
def opinionated():
    """scratch:tiny with weights wide enough to prefer some tokens to others."""
    return load_model("scratch:tiny", model_init_kwargs={"characters": "01=", "initializer_range": 0.3})


def logits_alone(model, rollouts, row):
    """What the model says before each completion token of this row, run by itself and without padding: `[tokens, v]`"""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    completion = rollouts.completion_ids[row][rollouts.completion_mask[row]]
    with torch.no_grad():
        output = model.eval()(input_ids=torch.cat([prompt, completion])[None], output_hidden_states=True)
    places = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return output.logits[0, places], output.hidden_states[-1][0, places], completion


def test_ppo_samples_at_temperature_1_unless_told_otherwise():
    """S39: sampling, not the likeliest token."""
    assert PPOConfig().temperature == 1.0
    assert PPOConfig(temperature=1.3).temperature == 1.3


def test_a_higher_temperature_explores_more(opinionated, make_trainer):
    """S39: near 0 every completion of a prompt is the likeliest one; at 1 they differ, and at 4 more of them do."""
    different = []
    for temperature in (1e-3, 1.0, 4.0):
        trainer = make_trainer(PPOTrainer, model=opinionated, temperature=temperature, num_generations=32)
        rollouts = trainer.generate_rollouts()
        first = rollouts.completion_ids[rollouts.group_ids == 0]
        different.append(len(first.unique(dim=0)))
        if temperature < 1:
            logits, _, completion = logits_alone(opinionated, rollouts, 0)
            stop = torch.tensor(trainer.sampling.stop_token_ids)
            logits[:, stop] = -torch.inf  # both tokens stand before the least length
            assert torch.equal(completion, logits.argmax(dim=1))
    assert different[0] == 1 < different[1] < different[2]


def test_lengths_lie_between_the_two_bounds_and_reach_both(make_trainer):
    """S40: with two stop tokens among seven, rows end as soon as they may, or are cut off."""
    trainer = make_trainer(
        PPOTrainer, min_completion_length=2, max_completion_length=4, num_generations=16, stop_token_ids=(ZERO,)
    )
    rollouts = trainer.run_step().rollouts
    assert (int(rollouts.lengths.min()), int(rollouts.lengths.max())) == (2, 4)
    last = rollouts.completion_ids[torch.arange(32), rollouts.lengths - 1]
    ended = torch.isin(last, torch.tensor(trainer.sampling.stop_token_ids))
    assert torch.equal(rollouts.stopped, ended) and not ended.all()
    assert rollouts.lengths[~ended].eq(4).all()


def test_a_least_length_above_the_greatest_is_refused():
    """S40."""
    with pytest.raises(ValueError, match=r"min_completion_length=5 is above max_completion_length=4"):
        PPOConfig(min_completion_length=5, max_completion_length=4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_token_is_recorded_as_the_model_alone_sees_it(temperature, opinionated, make_trainer):
    """S41, S43: mask, log-probabilities of sampler, trainer and reference, hidden states read by the value head."""
    trainer = make_trainer(
        PPOTrainer,
        model=opinionated,
        temperature=temperature,
        min_completion_length=1,
        max_completion_length=4,
        stop_token_ids=(ZERO,),
    )
    head = trainer.policies.module.value_model.score.weight
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    start, weight = copy.deepcopy(opinionated), head.detach().clone()
    rollouts = trainer.run_step().rollouts
    mask = rollouts.completion_mask
    assert len(rollouts.lengths.unique()) > 1
    for row in range(len(rollouts)):
        logits, hidden, completion = logits_alone(start, rollouts, row)
        logprobs = (logits / temperature).log_softmax(dim=1)[torch.arange(len(completion)), completion]
        for recorded in (rollouts.sampling_logprobs, rollouts.old_logprobs, rollouts.ref_logprobs):
            torch.testing.assert_close(recorded[row][mask[row]], logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(rollouts.values[row][mask[row]], hidden @ weight[0], atol=1e-4, rtol=0)
    for recorded in (rollouts.sampling_logprobs, rollouts.old_logprobs, rollouts.ref_logprobs, rollouts.values):
        assert recorded.shape == mask.shape and recorded[~mask].eq(0).all() and recorded[mask].ne(0).all()


# ---- T06: the first update is on-policy ---------------------------------------------------------------------


class Watched(PPOTrainer):
    """Keeps what `actor_loss` was given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ratios = []

    def actor_loss(self, ratio, advantages):
        self.ratios.append(ratio.detach())
        return super().actor_loss(ratio, advantages)


@pytest.fixture
def on_gpt2(tmp_path):
    return trainer_on_gpt2(Watched, tmp_path)


def test_the_first_update_has_ratio_1_and_the_second_has_not(on_gpt2):
    """T06."""
    on_gpt2.fit(scored_rollouts(on_gpt2))
    first, second = on_gpt2.ratios
    assert (first - 1).abs().max() <= 1e-5
    assert (second - 1).abs().max() > 1e-4


def test_kl_and_clip_fraction_of_the_first_update_are_0(on_gpt2):
    """T06, S43."""
    on_gpt2.config.num_epochs = 1
    row = on_gpt2.fit(scored_rollouts(on_gpt2)).result()
    assert abs(row["kl"]) <= 1e-6 and row["clip_fraction"] == 0 and abs(row["ref_kl"]) <= 1e-6
    assert row["grad_norm"] > 0


def test_each_row_is_scored_as_it_is_alone_without_padding(on_gpt2):
    """T06: prompts of 3 and 9 tokens in one batch."""
    start = copy.deepcopy(on_gpt2.model)
    rollouts = on_gpt2.fit(scored_rollouts(on_gpt2)).rollouts
    for row in range(len(rollouts)):
        logits, _, completion = logits_alone(start, rollouts, row)
        logprobs = (logits / 0.7).log_softmax(dim=1)[torch.arange(4), completion]
        torch.testing.assert_close(rollouts.old_logprobs[row], logprobs, atol=1e-5, rtol=0)


def test_doubled_old_logprobs_stop_ppo_before_any_weight_moves(on_gpt2, monkeypatch):
    """T06."""
    annotate = on_gpt2.policies.annotate

    def doubled(rollouts, **arguments):
        rollouts = annotate(rollouts, **arguments)
        return rollouts.replace(old_logprobs=2 * rollouts.old_logprobs)

    monkeypatch.setattr(on_gpt2.policies, "annotate", doubled)
    before = [value.detach().clone() for value in on_gpt2.policies.parameters.values()]
    with pytest.raises(RolloutError, match=r"on-policy.*No weight was changed"):
        on_gpt2.fit(scored_rollouts(on_gpt2))
    assert all(torch.equal(old, new) for old, new in zip(before, on_gpt2.policies.parameters.values()))
