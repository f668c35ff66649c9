"""PPO from a loop of one's own: `generate`, `step`, `log_stats`, as people learnt it, with the numbers of `train()`."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import fraction_right

from quintain import ConfigError, PPOTrainer, RolloutError, log_training_stats

EOS, ZERO, ONE = 2, 4, 5
"""Tokens of a tokenizer for "01="."""

PLAIN = {"kl_coef": 0.0, "gamma": 1.0, "lam": 1.0, "whiten_advantages": False, "num_epochs": 1}


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.policies.parameters.items()}


def same(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


def valid_rows(ids, mask):
    return [row[kept] for row, kept in zip(ids, mask)]


def test_three_steps_by_hand_are_three_steps_of_train(make_trainer):
    """S36, S38: ragged completions, two mini-batches, adaptive KL, a penalty on cut-off ends, a falling rate."""
    settings = {
        "max_steps": 3,
        "num_epochs": 2,
        "num_mini_batches": 2,
        "min_completion_length": 0,
        "max_completion_length": 3,
        "kl_control": "adaptive",
        "target_kl": 0.02,
        "kl_horizon": 40,
        "missing_eos_penalty": 0.5,
        "lr_scheduler_type": "linear",
    }
    by_train, by_hand = make_trainer(PPOTrainer, **settings), make_trainer(PPOTrainer, **settings)
    by_train.train()
    for row in by_train.run.state.log_history:
        rollouts = by_hand.generate_rollouts()
        queries = valid_rows(rollouts.prompt_ids, rollouts.prompt_mask)
        responses = valid_rows(rollouts.completion_ids, rollouts.completion_mask)
        stats = by_hand.step(queries, responses, fraction_right(rollouts.completions, rollouts.columns["answer"]))
        # train() goes by the log-probabilities kept at sampling; by hand they are computed again, up to rounding.
        for name in ("step", "reward", "kl", "ref_kl", "kl_coef", "entropy", "loss", "grad_norm", "learning_rate"):
            assert stats[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
        for name in ("clip_fraction", "loss/policy", "loss/value", "explained_variance", "completions/clipped_ratio"):
            assert stats[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
    for name, value in weights(by_train).items():
        torch.testing.assert_close(weights(by_hand)[name], value, atol=1e-4, rtol=1e-3)


def test_generate_answers_each_query_with_one_tensor_of_its_tokens(make_trainer):
    """S38, S40: ragged queries, as tensors, lists or text; the stop token is part of the answer."""
    queries = [torch.tensor([ZERO, ONE, 6]), [ONE], "01", "1=" * 5] * 8
    trainer = make_trainer(PPOTrainer, stop_token_ids=(ZERO,))
    responses = trainer.generate(queries, min_new_tokens=2, max_new_tokens=5)
    assert len(responses) == len(queries)
    assert all(response.ndim == 1 and response.dtype == torch.long for response in responses)
    lengths = {len(response) for response in responses}
    assert min(lengths) == 2 and max(lengths) == 5
    for response in responses:
        ends = torch.isin(response[1:], torch.tensor([ZERO, EOS]))  # the first token stands before the least length
        assert not ends[:-1].any() and (bool(ends[-1]) or len(response) == 5)


def test_generate_explores_as_much_as_it_is_told_to(make_trainer):
    """S39: near temperature 0 all answers to a query are one, and at 1 they are many."""
    trainer = make_trainer(PPOTrainer, max_completion_length=6, min_completion_length=6)
    greedy = trainer.generate(["01="] * 16, temperature=1e-4)
    sampled = trainer.generate(["01="] * 16)
    assert len(torch.stack(greedy).unique(dim=0)) == 1
    assert len(torch.stack(sampled).unique(dim=0)) > 8


def test_texts_and_tensors_of_the_same_tokens_teach_the_same(make_trainer):
    """S38: ragged queries and responses either way; scores may be tensors, as TRL 0.4 had them."""
    texts, tokens = make_trainer(PPOTrainer), make_trainer(PPOTrainer)
    before = weights(texts)
    texts.step(["01=", "1="], ["10", "0"], [1.0, 0.0])
    tokens.step(
        [torch.tensor([ZERO, ONE, 6]), [ONE, 6]],
        [[ONE, ZERO], torch.tensor([ZERO])],
        [torch.tensor(1.0), torch.tensor(0)],
    )
    assert same(weights(texts), weights(tokens)) and not same(before, weights(texts))


@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_responses_sampled_elsewhere_are_weighed_by_their_own_probabilities(ratio, make_trainer):
    """S48, S51: at ratio 1.5 and range 0.2 a good answer earns 1.2 and a bad one costs 1.5; advantages are 1 and -1."""
    trainer = make_trainer(PPOTrainer, **PLAIN)
    queries, responses = ["01=", "10="], [torch.tensor([ONE, ZERO]), torch.tensor([ZERO, ZERO])]
    probe = make_trainer(PPOTrainer, **PLAIN)
    online = [
        (probe.model(torch.tensor([[*probe.processing_class(query)["input_ids"], *response]])).logits[0, 2:4])
        .log_softmax(dim=1)
        .gather(1, response[:, None])[:, 0]
        for query, response in zip(queries, responses)
    ]
    given = [(values - math.log(ratio)).tolist() for values in online]
    stats = trainer.step(queries, responses, [1.0, -1.0], sampling_logprobs=given)
    earned = min(ratio, 1.2)
    assert stats["loss/policy"] == pytest.approx((-earned + ratio) / 2, abs=1e-5)
    assert stats["clip_frac"] == (0.5 if ratio > 1.2 else 0)
    assert stats["kl"] == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-5)


def test_without_sampling_logprobs_the_policy_is_taken_to_have_sampled(make_trainer):
    """S36: they are computed, so that the ratio is 1, whatever wrote the text."""
    stats = make_trainer(PPOTrainer, **PLAIN).step(["01=", "10="], ["1111", "0"], [1.0, 0.0])
    assert stats["kl"] == pytest.approx(0, abs=1e-7) and stats["clip_frac"] == 0
    assert stats["loss/policy"] == pytest.approx(-4 / 5)  # four tokens of advantage 1, one of 0


def test_stats_have_the_five_keys_and_are_printed(make_trainer, capsys):
    """S38, S62: a critic that says 0, every return 1 or 3: value loss 0.1 * (1 + 9) / 2 / 2."""
    trainer = make_trainer(PPOTrainer, **PLAIN)
    queries = ["01=", "10="]
    stats = trainer.step(queries, ["1", "0"], [1.0, 3.0])
    five = {"step": 1, "mean_reward": 2.0, "kl": 0.0, "clip_frac": 0.0, "value_loss": 0.25}
    assert {name: stats[name] for name in five} == pytest.approx(five, abs=1e-6)
    line = "step 1  mean reward 2.0000  KL 0.00000  clip fraction 0.0%  value loss 0.2500\n"
    capsys.readouterr()
    trainer.log_stats(stats, {"query": queries}, [torch.tensor(1.0), torch.tensor(3.0)])
    trainer.log_training_stats(stats)
    log_training_stats(stats)
    assert capsys.readouterr().out.replace("-0.00000", "0.00000") == line * 3
    assert trainer.step(queries, ["1", "0"], [1.0, 3.0])["step"] == 2


@pytest.mark.parametrize(
    ("responses", "given", "message"),
    [
        (["1", ""], None, "row 1 has an empty response"),
        (["1"], None, "one entry of responses for each of 2 queries: got 1"),
        (["11", "0"], [[-1.0], [-1.0]], "row 0 has 2 response tokens but 1 sampling_logprobs"),
    ],
)
def test_what_does_not_fit_together_is_refused_and_moves_nothing(responses, given, message, make_trainer):
    """S38."""
    trainer = make_trainer(PPOTrainer)
    before = weights(trainer)
    with pytest.raises(RolloutError, match=message):
        trainer.step(["01=", "10="], responses, [1.0, 0.0], sampling_logprobs=given)
    assert same(before, weights(trainer))


def test_what_trls_scripts_pass_to_generate_is_taken(make_trainer):
    """S38, S39: and a single query is one query, not a list of its characters."""
    trainer = make_trainer(PPOTrainer, max_completion_length=3)
    given = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "eos_token_id": -1,
        "return_prompt": False,
    }
    responses = trainer.generate(["01=", "10="], **given, max_new_tokens=3)
    assert [len(ids) for ids in responses] == [3, 3]  # no stop token: each goes on to the end
    assert len(trainer.generate("01=")) == 1
    assert len(trainer.generate(torch.tensor([4, 5, 6]))) == 1
    for option, message in (({"do_sample": False}, "no do_sample but True"), ({"temprature": 1}, "'temperature'")):
        with pytest.raises(ConfigError, match=message):
            trainer.generate(["01="], **option)
