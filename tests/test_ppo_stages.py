"""PPO's stages: each is one method with a known name, and overriding it changes what `train()` does."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quintain import PPOConfig, PPOTrainer, RewardError

# Advantages are then plain sums of the rewards still to come, less what the critic says; it says 0 at the start.
PLAIN = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False}


def completion_rows(trainer) -> list[dict]:
    """What the run recorded of each completion."""
    lines = (Path(trainer.config.output_dir) / "completions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.policies.parameters.items()}


def assert_equal_weights(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], atol=1e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def moved(before, trainer, part):
    """Whether any weight of the "language_model" or "value_model" has changed."""
    after = trainer.policies.parameters
    return any(not torch.equal(before[name], after[name]) for name in before if name.startswith(part))


def test_one_step_runs_the_stages_in_their_order(make_trainer):
    """S36, S37: rollout, reward, advantage, then actor and critic loss in every mini-batch of every epoch."""
    calls = []

    class Watched(PPOTrainer):
        def generate_rollouts(self):
            calls.append("generate_rollouts")
            return super().generate_rollouts()

        def score(self, rollouts):
            calls.append("score")
            return super().score(rollouts)

        def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
            calls.append("compute_rewards")
            return super().compute_rewards(scores, logprobs, ref_logprobs, masks)

        def compute_advantages(self, values, rewards, mask):
            calls.append("compute_advantages")
            return super().compute_advantages(values, rewards, mask)

        def train_minibatch(self, minibatch, statistics):
            calls.append("train_minibatch")
            return super().train_minibatch(minibatch, statistics)

        def actor_loss(self, ratio, advantages):
            calls.append("actor_loss")
            return super().actor_loss(ratio, advantages)

        def critic_loss(self, values, returns, old_values):
            calls.append("critic_loss")
            return super().critic_loss(values, returns, old_values)

    make_trainer(Watched, max_steps=1, num_epochs=2, num_mini_batches=2).train()
    prepare = ["generate_rollouts", "score", "compute_rewards", "compute_advantages"]
    assert calls == prepare + ["train_minibatch", "actor_loss", "critic_loss"] * 4


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_a_step_moves_actor_and_critic_and_reports_both_losses(value_model, make_trainer):
    """S36."""
    trainer = make_trainer(PPOTrainer, max_steps=1, value_model=value_model)
    before = weights(trainer)
    trainer.train()
    assert moved(before, trainer, "language_model") and moved(before, trainer, "value_model")
    (row,) = trainer.run.state.log_history
    assert {"reward", "kl", "clip_fraction", "explained_variance", "loss/policy", "loss/value"} <= set(row)
    assert row["loss/value"] > 0


def test_the_names_of_trl_0_4_are_all_there():
    """S38, W4: settings by their names then, and methods by the names of that trainer."""
    config = PPOConfig(
        num_generations=2,
        batch_size=16,
        mini_batch_size=4,
        ppo_epochs=3,
        learning_rate=1.41e-5,
        init_kl_coef=0.2,
        adap_kl_ctrl=True,
        kl_penalty="kl",
        use_score_scaling=True,
        target=6,
        horizon=5000,
        gamma=0.99,
        lam=0.9,
        cliprange=0.1,
        cliprange_value=0.3,
        vf_coef=0.5,
        seed=7,
    )
    assert (config.prompts_per_step, config.num_mini_batches, config.num_epochs) == (8, 4, 3)
    assert (config.kl_coef, config.target_kl, config.kl_horizon) == (0.2, 6, 5000)
    assert (config.kl_control, config.kl_estimator, config.scale_rewards) == ("adaptive", "k1", "running")
    assert (config.cliprange, config.cliprange_value, config.vf_coef) == (0.1, 0.3, 0.5)
    for name in ("generate", "step", "compute_rewards", "compute_advantages", "train_minibatch", "log_stats"):
        assert callable(getattr(PPOTrainer, name)), name


def test_an_overridden_generate_is_what_ppo_learns_from(make_trainer):
    """S37: 4 and 5 are the characters 0 and 1."""

    class Scripted(PPOTrainer):
        def generate(self, queries, **generation_kwargs):
            return [torch.tensor([5, 4, 5])[: 1 + number % 3] for number in range(len(queries))]

    trainer = make_trainer(Scripted, min_completion_length=0, max_completion_length=3, max_steps=1)
    trainer.train()
    assert [row["completion"] for row in completion_rows(trainer)] == ["1", "10", "101", "1", "10", "101", "1", "10"]


class MixedRewards(PPOTrainer):
    """0.5 fluency + 0.3 safety - kl_coef * KL, as people write it; fluency is what the reference thinks of the text."""

    def fluency(self, ref_logprobs, masks):
        return torch.stack([row[mask].mean() for row, mask in zip(ref_logprobs, masks)])

    def safety(self, scores):
        return scores

    def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
        kl = ((logprobs - ref_logprobs) * masks).sum(dim=1)
        return 0.5 * self.fluency(ref_logprobs, masks) + 0.3 * self.safety(scores) - self.kl_coef * kl


def test_mixed_rewards_of_an_override_are_what_training_sees(make_trainer):
    """S37, S54, S55: one number a completion, put on its last token; with no discount every token gets all of it."""
    trainer = make_trainer(MixedRewards, **PLAIN, min_completion_length=0, max_completion_length=3)
    first = trainer.run_step().rollouts
    second = trainer.run_step().rollouts
    assert not torch.equal(second.old_logprobs, second.ref_logprobs)  # else KL is not tried
    for rollouts in (first, second):
        for row, mask in enumerate(rollouts.completion_mask):
            reference, kl = rollouts.ref_logprobs[row][mask], (rollouts.old_logprobs - rollouts.ref_logprobs)[row][mask]
            expected = 0.5 * reference.mean() + 0.3 * rollouts.rewards[row] - 0.05 * kl.sum()
            got = rollouts.advantages[row] + rollouts.values[row]
            torch.testing.assert_close(got[mask], expected.expand(int(mask.sum())), atol=1e-5, rtol=0)


FORMS = {
    "rewards and non-score rewards": lambda rewards, non_score, _: (rewards, non_score),
    "rewards": lambda rewards, *_: rewards,
    "one number a completion": lambda rewards, *_: rewards.sum(dim=1),
    "a list of rows": lambda rewards, *_: list(rewards),
    "two lists of rows, as TRL 0.4": lambda rewards, non_score, _: (list(rewards), list(non_score)),
    "garbage outside the mask": lambda rewards, _, masks: torch.where(masks, rewards, torch.nan),
}


@pytest.mark.parametrize("form", FORMS)
def test_compute_rewards_may_return_its_rewards_in_any_of_its_forms(form, make_trainer):
    """S38, S54, W4. Without KL the whole reward is the score on the last token, so that one number can say it."""

    class Formed(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
            rewards, non_score = super().compute_rewards(scores, logprobs, ref_logprobs, masks)
            return FORMS[form](rewards, non_score, masks)

    kl_coef = 0.0 if form == "one number a completion" else 0.5
    settings = {"kl_coef": kl_coef, "min_completion_length": 0, "max_completion_length": 3}
    plain, formed = make_trainer(PPOTrainer, **settings), make_trainer(Formed, **settings)
    for _ in range(2):
        lengths = plain.run_step().rollouts.lengths
        formed.run_step()
        assert len(lengths.unique()) > 1  # else no row is ragged
    assert_equal_weights(weights(plain), weights(formed))


@pytest.mark.parametrize("shape", [(8, 5), (4,), (1, 8)])
def test_rewards_of_another_shape_are_refused_and_move_nothing(shape, make_trainer):
    """S54."""

    class Misshapen(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
            return torch.zeros(shape)

    trainer = make_trainer(Misshapen)
    before = weights(trainer)
    with pytest.raises(RewardError, match=r"compute_rewards must return rewards \[8, 2\]"):
        trainer.run_step()
    assert not moved(before, trainer, "")


class ClipAndKL(PPOTrainer):
    """Clipping plus a KL penalty inside the actor loss, as people write it."""

    def actor_loss(self, ratio, advantages):
        clipped = torch.clamp(ratio, 1 - self.cliprange, 1 + self.cliprange)
        policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        kl = (ratio - 1 - torch.log(ratio)).mean()
        return policy_loss + self.kl_coef * kl


def test_an_actor_loss_with_a_kl_penalty_holds_the_policy_back(make_trainer):
    """S52, S53: with a tiny weight it is plain PPO, and with a large one the policy stays nearer to the one before."""
    settings = {"num_epochs": 4, "learning_rate": 3e-3, "cliprange": 0.9}
    rows = {}
    for name, trainer_class, kl_coef in (
        ("plain", PPOTrainer, 1e-9),
        ("tiny", ClipAndKL, 1e-9),
        ("large", ClipAndKL, 30),
    ):
        rows[name] = make_trainer(trainer_class, **settings, kl_coef=kl_coef).run_step().result()
    assert rows["tiny"]["kl"] == pytest.approx(rows["plain"]["kl"], rel=1e-3)
    assert rows["large"]["kl"] < 0.5 * rows["plain"]["kl"]


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_constant_actor_loss_is_logged_as_that_constant(budget, make_trainer):
    """S53: whatever the override returns is the loss: each token's, or their mean, over any split."""

    class PerToken(PPOTrainer):
        def actor_loss(self, ratio, advantages):
            return 0 * ratio + 3.0

    class Mean(PPOTrainer):
        def actor_loss(self, ratio, advantages):
            return (0 * ratio + 3.0).mean()

    for trainer_class in (PerToken, Mean):
        trainer = make_trainer(trainer_class, min_completion_length=0, micro_batch_tokens=budget)
        assert trainer.run_step().result()["loss/policy"] == pytest.approx(3.0, abs=1e-6)


def test_a_plain_mean_in_the_hooks_trains_as_the_loss_of_each_token_does(make_trainer):
    """S37, S53: hooks receive valid tokens only, so that a mean is right on ragged rows cut into micro-batches."""
    shapes = []

    class Means(PPOTrainer):
        def actor_loss(self, ratio, advantages):
            shapes.append(ratio.shape)
            assert ratio.shape == advantages.shape and bool((ratio > 0).all())
            return super().actor_loss(ratio, advantages).mean()

        def critic_loss(self, values, returns, old_values):
            assert values.shape == returns.shape == old_values.shape == shapes[-1]
            return super().critic_loss(values, returns, old_values).mean()

    settings = {"min_completion_length": 0, "max_completion_length": 4, "micro_batch_tokens": 15, "num_mini_batches": 2}
    plain, means = make_trainer(PPOTrainer, **settings), make_trainer(Means, **settings)
    lengths = plain.run_step().rollouts.lengths
    means.run_step()
    assert len(lengths.unique()) > 1
    assert sum(shape.numel() for shape in shapes) == 4 * lengths.sum()  # every epoch, every valid token once
    assert_equal_weights(weights(plain), weights(means))


def test_a_critic_loss_of_nothing_leaves_the_critic_as_it_was(make_trainer):
    """S37, S49."""

    class NoCritic(PPOTrainer):
        def critic_loss(self, values, returns, old_values):
            return 0 * values

    trainer = make_trainer(NoCritic)
    before = weights(trainer)
    assert trainer.run_step().result()["loss/value"] == 0
    assert moved(before, trainer, "language_model") and not moved(before, trainer, "value_model")


def test_overridden_advantages_are_what_the_actor_is_moved_by(make_trainer):
    """S37."""

    class Scripted(PPOTrainer):
        def compute_advantages(self, values, rewards, mask):
            return torch.where(mask, 7.0, 0.0), super().compute_advantages(values, rewards, mask)[1]

        def actor_loss(self, ratio, advantages):
            assert advantages.eq(7.0).all()
            return super().actor_loss(ratio, advantages)

    trainer = make_trainer(Scripted, max_steps=1, num_epochs=1)
    trainer.train()
    assert {row["advantage"] for row in completion_rows(trainer)} == {7.0}
    assert trainer.run.state.log_history[0]["loss/policy"] == pytest.approx(-7.0, abs=1e-5)  # at ratio 1


def test_an_overridden_train_minibatch_is_the_update(make_trainer):
    """S37: two mini-batches, three epochs, two steps; one that does nothing but count moves nothing."""
    sizes = []

    class Idle(PPOTrainer):
        def train_minibatch(self, minibatch, statistics):
            sizes.append(len(minibatch))
            statistics.set(loss=0.0, grad_norm=0.0)

    trainer = make_trainer(Idle, num_mini_batches=2, num_epochs=3)
    before = weights(trainer)
    trainer.train()
    assert sizes == [4] * 12
    assert_equal_weights(before, weights(trainer))


def test_rewards_of_two_functions_and_an_override_work_together(make_trainer):
    """S54, S55: the override sees the weighted sum of what functions said about prompts and completions."""
    seen = []

    def rising(prompts, completions, **_):
        assert all(prompt.endswith("=") for prompt in prompts)
        return [float(sum(a < b for a, b in pairwise(text))) for text in completions]

    def zeros(completions, answer, **_):
        assert len(answer) == len(completions)
        return [float(text.count("0")) for text in completions]

    class Watched(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
            seen.extend(scores.tolist())
            return super().compute_rewards(scores, logprobs, ref_logprobs, masks)

    settings = {"min_completion_length": 4, "max_completion_length": 4, "reward_weights": (0.5, 0.3)}
    trainer = make_trainer(Watched, reward_funcs=[rising, zeros], **settings)
    texts = trainer.run_step().rollouts.completions
    expected = [0.5 * sum(a < b for a, b in pairwise(text)) + 0.3 * text.count("0") for text in texts]
    assert len(set(expected)) > 2
    assert seen == pytest.approx(expected)
