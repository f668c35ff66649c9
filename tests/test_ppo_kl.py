"""PPO held near where it was: KL in the reward, in the loss or both, its coefficient, and bounds on one rollout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from quintain import ConfigError, PPOConfig, PPOTrainer, RLOOTrainer

FAST = {"learning_rate": 3e-3, "num_epochs": 2, "max_steps": 4}
"""Enough for KL to the start to be seen after a step."""


def log(trainer) -> list[dict]:
    lines = (Path(trainer.config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def valid(rollouts, values):
    return values[rollouts.completion_mask]


class CountsUpdates(PPOTrainer):
    updates = 0

    def train_minibatch(self, minibatch, statistics):
        self.updates += 1
        super().train_minibatch(minibatch, statistics)


# ---- the coefficient -------------------------------------------------------------------------------------------------


def test_a_fixed_coefficient_is_the_same_in_every_step(make_trainer):
    """S45."""
    trainer = make_trainer(PPOTrainer, **FAST, kl_coef=0.07)
    rows = [trainer.run_step().result() for _ in range(3)]
    assert rows[-1]["ref_kl"] > 1e-3
    assert [row["kl_coef"] for row in rows] == [0.07] * 3


def adapted(coefficient, row, *, target, horizon, samples):
    """The coefficient after a step: KL a completion against its target, the error bounded to a fifth."""
    error = min(max(row["ref_kl"] * row["completions/mean_length"] / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)


def test_an_adaptive_coefficient_follows_the_observed_kl_by_hand(make_trainer):
    """S46: it falls while the policy is still the reference, less when near the target, and rises once beyond it."""
    trainer = make_trainer(PPOTrainer, **FAST, kl_coef=0.07, kl_control="adaptive", target_kl=0.15, kl_horizon=40)
    rows = [trainer.run_step().result() for _ in range(4)]
    coefficients = [row["kl_coef"] for row in rows]
    expected = [0.07]
    for row in rows[:-1]:
        expected.append(adapted(expected[-1], row, target=0.15, horizon=40, samples=8))
    assert coefficients == pytest.approx(expected)
    assert coefficients[1] == pytest.approx(0.07 * (1 - 0.2 * 8 / 40)) and coefficients[-1] > coefficients[-2]


def test_a_resumed_run_goes_on_with_the_coefficient_it_had_reached(make_trainer, tmp_path):
    """S46: saved with the run. The config of the resumed run still says 0.07."""
    settings = {**FAST, "kl_coef": 0.07, "kl_control": "adaptive", "target_kl": 0.02, "kl_horizon": 40}
    first = make_trainer(PPOTrainer, **settings, save_steps=1)
    first.max_steps = 2
    first.train()
    resumed = make_trainer(PPOTrainer, **settings, save_steps=None)
    resumed.train(resume_from=tmp_path / "run")
    rows = log(resumed)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["kl_coef"] != 0.07
    assert rows[2]["kl_coef"] == pytest.approx(adapted(rows[1]["kl_coef"], rows[1], target=0.02, horizon=40, samples=8))


# ---- where KL is weighed ---------------------------------------------------------------------------------------------


PLACES = {"reward": (0.5, 0.0), "loss": (0.0, 0.5), "both": (0.5, 0.5)}


@pytest.mark.parametrize("place", PLACES)
def test_kl_enters_the_reward_the_loss_or_both(place, make_trainer):
    """S44, S52."""
    in_reward, in_loss = PLACES[place]
    trainer = make_trainer(
        PPOTrainer,
        **{**FAST, "whiten_advantages": False, "gamma": 1.0, "lam": 1.0},
        kl_coef=in_reward,
        kl_in_loss=in_loss,
    )
    trainer.run_step()
    statistics = trainer.run_step()
    rollouts = statistics.rollouts
    kl = ((rollouts.old_logprobs - rollouts.ref_logprobs) * rollouts.completion_mask).sum(dim=1)
    assert kl.abs().max() > 1e-3
    torch.testing.assert_close(rollouts.returns[:, 0], rollouts.rewards - in_reward * kl, atol=1e-5, rtol=0)
    assert ("loss/kl" in statistics.result()) == (in_loss > 0)


@pytest.mark.parametrize(
    ("weight", "kl_estimator"),
    [({"kl_coef": 3.0}, "k1"), ({"kl_in_loss": 3.0}, "k1"), ({"kl_in_loss": 3.0}, "exact")],
)
def test_a_weight_on_kl_keeps_the_policy_nearer_to_its_start(weight, kl_estimator, make_trainer):
    """S44, S52."""

    def zeros(completions, **_):
        return [float(text.count("0")) for text in completions]

    final = {}
    for name, weights in (("free", {"kl_coef": 1e-6}), ("held", {"kl_coef": 1e-6, **weight})):
        trainer = make_trainer(
            PPOTrainer, **FAST, **weights, reward_funcs=zeros, kl_estimator=kl_estimator, num_generations=16
        )
        final[name] = [trainer.run_step().result()["ref_kl"] for _ in range(8)][-1]
    assert final["held"] < 0.5 * final["free"]


def test_the_kl_that_is_subtracted_or_added_is_logged_by_the_name_of_its_estimator(make_trainer):
    """S43, S44, S52: k1 in the reward, which may be negative, and k2 in the loss; the weights are not part of them."""
    trainer = make_trainer(PPOTrainer, **{**FAST, "num_epochs": 1}, kl_coef=0.3, kl_in_loss=0.2)
    trainer.run_step()
    statistics = trainer.run_step()
    log_ratio = valid(statistics.rollouts, statistics.rollouts.old_logprobs - statistics.rollouts.ref_logprobs)
    row = statistics.result()
    assert row["reward_kl/k1"] == pytest.approx(float(log_ratio.mean()), rel=1e-4)
    assert row["loss_kl/k2"] == pytest.approx(float(log_ratio.square().mean()) / 2, rel=1e-4)
    assert row["loss/kl"] == pytest.approx(0.2 * row["loss_kl/k2"], rel=1e-5) and row["loss/kl"] > 0


def test_kl_to_the_reference_is_measured_token_by_token(make_trainer):
    """S43: `ref_kl`, the mean of exp(-x) - 1 + x over valid tokens, x the log-ratio of sampling policy to reference."""
    trainer = make_trainer(PPOTrainer, **FAST, min_completion_length=1)
    trainer.run_step()
    statistics = trainer.run_step()
    rollouts = statistics.rollouts
    log_ratio = valid(rollouts, rollouts.old_logprobs - rollouts.ref_logprobs).double()
    expected = float(((-log_ratio).exp() - 1 + log_ratio).mean())
    assert statistics.result()["ref_kl"] == pytest.approx(expected, rel=1e-3) and expected > 1e-3


# ---- bounds on one rollout -------------------------------------------------------------------------------------------


def test_stop_kl_ends_the_epochs_of_a_rollout(make_trainer):
    """S51: the second epoch finds the policy too far away, and the other two are left out."""
    trainer = make_trainer(CountsUpdates, **{**FAST, "num_epochs": 4}, stop_kl=1e-6, num_mini_batches=2)
    row = trainer.run_step().result()
    assert row["epochs_skipped"] == 4 - trainer.updates // 2 > 0
    free = make_trainer(CountsUpdates, **{**FAST, "num_epochs": 4}, stop_kl=1e6, num_mini_batches=2)
    row = free.run_step().result()
    assert free.updates == 8 and "epochs_skipped" not in row


@pytest.mark.parametrize(("threshold", "skipped"), [(1.4, 2), (1.6, 0), (None, 0)])
def test_a_runaway_mini_batch_moves_nothing_and_is_counted(threshold, skipped, make_trainer, caplog):
    """S51: answers sampled elsewhere, each token at a ratio of 1.5 to that policy, in two mini-batches."""
    # Small steps: after the first mini-batch the ratio of the second is still nearer to 1.5 than to the thresholds.
    settings = {"num_epochs": 1, "num_mini_batches": 2, "learning_rate": 1e-6}
    trainer = make_trainer(PPOTrainer, **settings, ratio_threshold=threshold)
    queries, responses = ["01=", "10="], [torch.tensor([5, 4]), torch.tensor([4, 4])]
    online = trainer.model(torch.tensor([[4, 5, 6, 5, 4], [5, 4, 6, 4, 4]])).logits[:, 2:4].log_softmax(dim=2)
    logprobs = online.gather(2, torch.stack(responses)[:, :, None])[:, :, 0]
    before = {name: value.detach().clone() for name, value in trainer.policies.parameters.items()}
    stats = trainer.step(queries, responses, [1.0, -1.0], sampling_logprobs=list(logprobs.detach() - math.log(1.5)))
    assert stats.get("updates_skipped", 0) == skipped
    assert stats["ratio_max"] == pytest.approx(1.5, abs=0.01)
    moved = any(not torch.equal(value, before[name]) for name, value in trainer.policies.parameters.items())
    assert moved == (skipped == 0)
    warnings = [record.getMessage() for record in caplog.records if "ratio_threshold" in record.getMessage()]
    assert len(warnings) == skipped and all("1.5" in warning for warning in warnings)


def test_ppo_leaves_out_updates_at_a_mean_ratio_above_10_by_default():
    """S51."""
    assert PPOConfig().ratio_threshold == 10.0


def test_a_policy_is_moved_less_by_a_narrower_clip_range(make_trainer):
    """S48, S51: many epochs on one rollout, so that the bound is reached."""
    moved = {}
    for cliprange in (0.01, 0.9):
        trainer = make_trainer(PPOTrainer, learning_rate=3e-3, num_epochs=10, cliprange=cliprange)
        row = trainer.run_step().result()
        moved[cliprange] = row["kl"]
        assert row["clip_fraction"] > 0.2 or cliprange > 0.5
    assert moved[0.01] < 0.5 * moved[0.9]


def test_an_adaptive_coefficient_without_a_target_or_of_0_is_refused():
    """S46."""
    with pytest.raises(ConfigError, match="needs target_kl"):
        PPOConfig(kl_control="adaptive")
    with pytest.raises(ConfigError, match="scales kl_coef, which is 0"):
        PPOConfig(kl_control="adaptive", target_kl=6.0, kl_coef=0.0)


@pytest.mark.parametrize("trainer_class", [PPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("whiten", [False, True])
def test_exact_kl_in_the_reward_restrains_the_policy_as_much_as_sampled_kl_does(trainer_class, whiten, make_trainer):
    """S43, S44: the exact KL of a token is the same whichever token is drawn: as a reward alone it credits none.

    With completions of one token and no other reward, the expected gradient is that of KL: many samples of k1 and a
    few of the exact form must point the same way, with the same length.
    """

    def gradient(estimator):
        own = {"kl_coef": 1.0, "whiten_advantages": whiten, "vf_coef": 1e-6} if trainer_class is PPOTrainer else {}
        if trainer_class is RLOOTrainer:
            own = {"beta": 1.0, "normalize_advantages": whiten}
        trainer = make_trainer(
            trainer_class,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            **{
                "max_completion_length": 1,
                "min_completion_length": 1,
                "num_epochs": 1,
                "kl_estimator": estimator,
                **own,
            },
            num_generations=4096,
        )
        trainer.first_update.untrained = False
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, value in trainer.policies.parameters.items():
                if "lm_head" in name:
                    value.add_(torch.randn(value.shape, generator=generator) * 0.1)
        seen = []

        def keep(leave_out):
            policy = [value for name, value in trainer.policies.parameters.items() if name.startswith("language_model")]
            seen.append(torch.cat([value.grad.flatten() for value in policy if value.grad is not None]))
            trainer.optimizer.zero()
            return {"grad_norm": 0.0}

        trainer.optimizer.step = keep
        trainer.run_step()
        return seen[0]

    sampled, exact = gradient("k1"), gradient("exact")
    assert torch.nn.functional.cosine_similarity(sampled, exact, dim=0) > 0.95
    if not whiten:
        assert float(exact.norm()) == pytest.approx(float(sampled.norm()), rel=0.1)
