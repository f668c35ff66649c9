"""PPO's rewards: models and functions, KL beside the score, rewards before the end of a text, bounds on extremes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quintain import PPOTrainer
from quintain.policies.scratch import scratch_model, scratch_tokenizer

# With a critic that says 0, the advantage of a token is then the sum of the rewards from it on.
PLAIN = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
ZERO = 4
"""The token "0" of a tokenizer for "01="."""


def zeros(completions, **_):
    """How many zeros a completion has."""
    return [float(text.count("0")) for text in completions]


class WithoutCritic(PPOTrainer):
    """Its critic says 0 for ever."""

    def critic_loss(self, values, returns, old_values):
        return 0 * values


def token_rewards(rollouts):
    """Each token's reward, as differences of the advantages under PLAIN settings without a critic."""
    later = torch.nn.functional.pad(rollouts.advantages, (0, 1))[:, 1:]
    return torch.where(rollouts.completion_mask, rollouts.advantages - later, 0.0)


def at_last(scores, mask):
    expected = torch.zeros(mask.shape)
    for row in range(len(mask)):
        expected[row, int(mask[row].sum()) - 1] = scores[row]
    return expected


def completion_rows(trainer) -> list[dict]:
    lines = (Path(trainer.config.output_dir) / "completions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def findings(trainer) -> list[str]:
    lines = (Path(trainer.config.output_dir) / "findings.jsonl").read_text().splitlines()
    return [json.loads(line)["rule"] for line in lines]


# ---- where the score comes from --------------------------------------------------------------------------------------


def test_a_reward_model_with_its_own_tokenizer_and_a_function_score_together(make_trainer):
    """S42, S54, S55: the reward model counts its characters from another end than the policy."""
    model, tokenizer = scratch_model(head="sequence_classification", characters="=10", seed=3), scratch_tokenizer("=10")
    with torch.no_grad():
        model.score.weight.mul_(50.0)
    trainer = make_trainer(
        PPOTrainer,
        reward_funcs=zeros,
        reward_weights=(0.5, 2.0),
        trainer={"reward_model": model, "reward_processing_classes": [None, tokenizer]},
    )
    rollouts = trainer.run_step().rollouts
    for row, (prompt, completion) in enumerate(zip(rollouts.prompts, rollouts.completions)):
        with torch.no_grad():
            score = float(model(input_ids=torch.tensor([tokenizer(prompt + completion)["input_ids"]])).logits)
        assert rollouts.rewards[row] == pytest.approx(0.5 * completion.count("0") + 2 * score, abs=1e-4)
    assert rollouts.rewards.std() > 0.1
    assert {"rewards/zeros/mean", "rewards/scratch:tiny/mean"} <= set(trainer.run_step().result())


def test_a_reward_model_alone_is_enough(make_trainer):
    """S42: TRL's PPO took nothing else."""
    model = scratch_model(head="sequence_classification", characters="01=", seed=3)
    trainer = make_trainer(
        PPOTrainer,
        reward_funcs=None,
        trainer={"reward_model": model, "reward_processing_classes": scratch_tokenizer("01=")},
    )
    assert trainer.run_step().rollouts.rewards.std() > 0


def test_built_in_task_and_sentiment_rewards_are_used_by_name(make_trainer):
    """S55: task completion and sentiment, weighted."""
    pytest.importorskip("vaderSentiment")
    trainer = make_trainer(
        PPOTrainer, reward_funcs=["exact_match", "sentiment"], reward_weights=(0.8, 0.2), max_steps=1
    )
    trainer.train()
    for row in completion_rows(trainer):
        assert set(row["rewards"]) == {"exact_match", "sentiment"}
        expected = 0.8 * row["rewards"]["exact_match"] + 0.2 * row["rewards"]["sentiment"]
        assert row["reward"] == pytest.approx(expected, abs=1e-6)


def test_functions_see_prompts_completions_and_columns_of_the_same_rows(make_trainer):
    """S54."""
    seen = []

    def watched(prompts, completions, completion_ids, answer, **_):
        seen.extend(zip(prompts, completions, completion_ids, answer))
        return [1.0] * len(completions)

    trainer = make_trainer(PPOTrainer, reward_funcs=watched)
    rollouts = trainer.run_step().rollouts
    assert len(seen) == 8
    for prompt, completion, ids, answer in seen:
        assert answer == prompt[1] + prompt[0]
        assert completion == trainer.processing_class.decode(ids, skip_special_tokens=True)
    assert [completion for _, completion, _, _ in seen] == rollouts.completions


# ---- from scores to rewards ------------------------------------------------------------------------------------------


def test_rewards_are_the_score_less_weighted_kl_by_hand(make_trainer):
    """S43, S44: log-ratios 0.5, -1 in a row of two tokens and 0.25, 0, 2 in one of three; weight 0.1."""
    trainer = make_trainer(PPOTrainer, kl_coef=0.1)
    logprobs = torch.tensor([[-1.0, -2.0, torch.nan], [-1.0, -1.0, -1.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, torch.nan], [-1.25, -1.0, -3.0]])
    masks = torch.tensor([[True, True, False], [True, True, True]])
    rewards, non_score = trainer.compute_rewards(torch.tensor([2.0, -1.0]), logprobs, ref_logprobs, masks)
    torch.testing.assert_close(non_score, torch.tensor([[-0.05, 0.1, 0.0], [-0.025, 0.0, -0.2]]))
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 2.1, 0.0], [-0.025, 0.0, -1.2]]))


@pytest.mark.parametrize("kl_coef", [0.0, 0.7])
def test_training_is_rewarded_by_the_score_less_weighted_kl(kl_coef, make_trainer):
    """S44: lambda is `kl_coef`; the score sits on the last valid token, and not a slot later."""
    lengths = {"min_completion_length": 1, "max_completion_length": 4}
    trainer = make_trainer(WithoutCritic, **PLAIN, **lengths, reward_funcs=zeros, kl_coef=kl_coef, num_generations=8)
    first, second = (trainer.run_step().rollouts for _ in range(2))
    assert len(second.lengths.unique()) > 1 and len(second.rewards.unique()) > 1
    for rollouts in (first, second):
        log_ratio = 0.0 if rollouts.ref_logprobs is None else rollouts.old_logprobs - rollouts.ref_logprobs
        expected = at_last(rollouts.rewards, rollouts.completion_mask) - kl_coef * log_ratio
        torch.testing.assert_close(token_rewards(rollouts), expected, atol=1e-5, rtol=0)
    if kl_coef:
        assert (second.old_logprobs - second.ref_logprobs).abs().max() > 0.01  # else KL was not tried


def test_rewards_before_the_end_stay_on_the_tokens_that_earned_them(make_trainer):
    """S56: a list of numbers for a completion, one a token, in place of one at its end."""

    def each_zero(completion_ids, **_):
        return [[float(token == ZERO) for token in ids] for ids in completion_ids]

    trainer = make_trainer(
        WithoutCritic, **PLAIN, reward_funcs=each_zero, kl_coef=0.0, min_completion_length=1, max_completion_length=5
    )
    rollouts = trainer.run_step().rollouts
    expected = (rollouts.completion_ids.eq(ZERO) & rollouts.completion_mask).float()
    assert 0 < expected.sum() < rollouts.completion_mask.sum()
    torch.testing.assert_close(token_rewards(rollouts), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(rollouts.rewards, expected.sum(dim=1))


def test_dense_and_final_rewards_add_up_by_their_weights(make_trainer):
    """S55, S56."""

    def dense(completion_ids, **_):
        return [[1.0] * len(ids) for ids in completion_ids]

    def final(completions, **_):
        return [10.0] * len(completions)

    trainer = make_trainer(WithoutCritic, **PLAIN, reward_funcs=[dense, final], reward_weights=(0.5, 0.3), kl_coef=0.0)
    rollouts = trainer.run_step().rollouts
    torch.testing.assert_close(token_rewards(rollouts), torch.tensor([[0.5, 3.5]]).expand(8, 2))


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_a_completion_that_does_not_end_is_rewarded_less(make_trainer):
    """S57: `missing_eos_penalty`, against the loophole of writing until the limit."""
    trainer = make_trainer(
        PPOTrainer,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        missing_eos_penalty=0.75,
        min_completion_length=0,
        max_completion_length=3,
        num_generations=16,
    )
    rollouts = trainer.run_step().rollouts
    assert 0 < rollouts.stopped.sum() < 32
    torch.testing.assert_close(rollouts.rewards, torch.where(rollouts.stopped, 1.0, 0.25))


def test_an_extreme_reward_is_bounded_and_counted(make_trainer):
    """S57: one reward of a million among small ones, with `reward_clip`."""

    def with_a_bug(completions, **_):
        return [1e6, *([0.5] * (len(completions) - 1))]

    trainer = make_trainer(WithoutCritic, **PLAIN, reward_funcs=with_a_bug, reward_clip=(-2.0, 2.0))
    statistics = trainer.run_step()
    assert statistics.rollouts.rewards.tolist() == [2.0] + [0.5] * 7
    torch.testing.assert_close(statistics.rollouts.advantages[:, -1], statistics.rollouts.rewards)
    assert statistics.result()["rewards/clipped_fraction"] == 1 / 8


def test_an_extreme_reward_that_is_not_bounded_is_reported(make_trainer):
    """S57."""

    def loophole(completions, trainer_state, **_):
        scores = [float(text.count("0")) for text in completions]
        return [1e4 * scores[0] + 1e4, *scores[1:]] if trainer_state.global_step == 11 else scores

    trainer = make_trainer(PPOTrainer, reward_funcs=loophole, max_steps=12, num_epochs=1, min_completion_length=1)
    trainer.train()
    assert "reward_outlier" in findings(trainer)


def test_whitened_rewards_have_variance_1_over_valid_tokens_and_keep_their_sign(make_trainer):
    """S50: reward normalisation, not shifted, so that a good completion stays good."""
    lengths = {"min_completion_length": 1, "max_completion_length": 4}
    trainer = make_trainer(WithoutCritic, **PLAIN, **lengths, reward_funcs=zeros, kl_coef=0.0, whiten_rewards=True)
    rollouts = trainer.run_step().rollouts
    mask = rollouts.completion_mask
    plain = at_last(rollouts.rewards, mask)
    assert len(rollouts.lengths.unique()) > 1 and len(rollouts.rewards.unique()) > 1
    scale = plain[mask].std(correction=0)
    torch.testing.assert_close(token_rewards(rollouts), plain / scale, atol=1e-5, rtol=1e-5)


def numbered(completions, **_):
    """Scores 0, 1, 2, ... in the order of the batch."""
    return [float(row) for row in range(len(completions))]


def test_scores_scaled_by_their_batch_by_hand(make_trainer):
    """S50, S57: scores 0 to 7 have mean 3.5 and sample variance 6; logs keep the scores as they came."""
    trainer = make_trainer(WithoutCritic, **PLAIN, kl_coef=0.0, reward_funcs=numbered, scale_rewards="batch")
    for _ in range(2):
        statistics = trainer.run_step()
        expected = (torch.arange(8.0) - 3.5) / 6**0.5
        torch.testing.assert_close(statistics.rollouts.advantages[:, 1], expected)
        assert statistics.rollouts.rewards.tolist() == list(range(8))
        row = statistics.result()
        assert (row["reward"], row["score_mean"]) == (3.5, 3.5) and row["score_std"] == pytest.approx(6**0.5)


class Rising:
    """Scores 0 to 7 in the first step, 10 to 17 in the second, and so on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, completions, **_):
        self.calls += 1
        return [10.0 * (self.calls - 1) + row for row in range(len(completions))]


def test_running_scores_are_scaled_by_all_there_have_been(make_trainer):
    """S50: the second step's by 16 scores, of mean 8.5; a better step stays better, as it does not by its batch."""
    trainer = make_trainer(WithoutCritic, **PLAIN, kl_coef=0.0, reward_funcs=Rising(), scale_rewards="running")
    trainer.run_step()
    statistics = trainer.run_step()
    every = torch.cat([torch.arange(8.0), torch.arange(10.0, 18.0)])
    expected = (every[8:] - 8.5) / every.std()
    torch.testing.assert_close(statistics.rollouts.advantages[:, 1], expected)
    assert expected.mean() > 0.5
    assert statistics.result()["score_std"] == pytest.approx(float(every.std()))


def test_a_resumed_run_scales_by_the_scores_from_before_too(make_trainer, tmp_path):
    """S50: the moments are saved with the run."""
    settings = {"reward_funcs": zeros, "scale_rewards": "running", "num_epochs": 1, "max_steps": 3}
    first = make_trainer(PPOTrainer, **settings, save_steps=1)
    first.max_steps = 2
    first.train()
    resumed = make_trainer(PPOTrainer, **settings)
    resumed.train(resume_from=tmp_path / "run")
    scores = torch.tensor([row["reward"] for row in completion_rows(resumed)])
    assert len(scores) == 3 * 8
    last = resumed.run.state.log_history[-1]
    assert last["score_mean"] == pytest.approx(float(scores.mean()), rel=1e-6)
    assert last["score_std"] == pytest.approx(float(scores.std()), rel=1e-6)


def test_scaled_scores_are_kept_within_the_score_clip_and_counted(make_trainer):
    """S50, S57: of eight scores, those beyond one standard deviation: 0, 1, 6 and 7."""
    trainer = make_trainer(
        WithoutCritic, **PLAIN, kl_coef=0.0, reward_funcs=numbered, scale_rewards="batch", score_clip=1.0
    )
    statistics = trainer.run_step()
    expected = ((torch.arange(8.0) - 3.5) / 6**0.5).clamp(-1, 1)
    torch.testing.assert_close(statistics.rollouts.advantages[:, 1], expected)
    assert statistics.result()["score_clipped_fraction"] == 0.5


def test_dense_rewards_are_scaled_with_their_total(make_trainer):
    """S50, S56: scores of 2 * row, half of it on each token; the shift by the mean of 7 falls on the last token."""
    trainer = make_trainer(
        WithoutCritic,
        **PLAIN,
        kl_coef=0.0,
        reward_funcs=lambda completions, **_: [[float(row), float(row)] for row in range(len(completions))],
        scale_rewards="batch",
    )
    rollouts = trainer.run_step().rollouts
    row = torch.arange(8.0)
    std = (2 * row).std()
    expected = torch.stack([row / std, (row - 7) / std], dim=1)
    torch.testing.assert_close(token_rewards(rollouts), expected)
