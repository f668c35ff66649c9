"""The doctor is silent on healthy runs and names the right fault on sick ones (S57-S61, S68, W7)."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict

import pytest
import torch
import yaml

from quintain.errors import DataError
from quintain.monitor.health import Doctor, Finding, examine_run
from quintain.monitor.history import History
from quintain.monitor.rules import RULES
from quintain.monitor.runs import read_metrics

GRPO = {
    "algorithm": "grpo",
    "epsilon": 0.2,
    "num_epochs": 2,
    "num_mini_batches": 2,
    "num_generations": 8,
    "max_steps": 200,
    "warmup_steps": 0.05,
    "max_completion_length": 256,
    "use_target_policy": True,
}
PPO = {key: value for key, value in GRPO.items() if key != "epsilon"} | {
    "algorithm": "ppo",
    "cliprange": 0.2,
    "num_generations": 1,
    "num_epochs": 4,
}
HEAD_START = {**PPO, "value_warmup_steps": 60}
QUICKSTART = {
    "algorithm": "tpo",
    "group_logits": "logratio",
    "num_epochs": 1,
    "num_mini_batches": 1,
    "num_generations": 8,
    "max_steps": 40,
    "max_completion_length": 24,
    "use_target_policy": True,
}


def healthy_run(seed: int, settings: dict, *, solved: bool = False, sparse: bool = False) -> list[dict[str, float]]:
    """Rows of a run that learns: reward rises and levels off, entropy falls, the critic settles, all with noise.

    `solved`: a task with one right answer, where reward ends at 1, entropy at 0 and every group is tied.
    `sparse`: rewards are nearly all 0 at first.

    During `value_warmup_steps` the policy stands still, and the critic explains four fifths of the returns' variance.
    """
    draw = random.Random(seed)

    def noisy(value: float, spread: float) -> float:
        return max(value * math.exp(draw.gauss(0.0, spread)), 0.0)

    reused = settings["num_epochs"] * settings["num_mini_batches"] > 1
    head_start = settings.get("value_warmup_steps", 0)
    steps, rows = settings["max_steps"] - head_start, []
    start, end = (0.01, 0.5) if sparse else (0.2, 1.0 if solved else 0.7)
    for step in range(head_start + steps):
        moves = step >= head_start
        progress = 1 / (1 + math.exp(-12 * (max(step - head_start, 0) / steps - (0.45 if sparse else 0.3))))
        mean = start + (end - start) * progress
        spread = math.sqrt(max(mean * (1 - mean), 1e-4))
        row = {
            "step": step,
            "reward": min(max(mean + draw.gauss(0, spread / 8), 0.0), 1.0),
            "reward_std": noisy(spread, 0.2),
            "frac_reward_zero_std": 1.0 if solved and progress > 0.99 else min(0.9 - 0.5 * spread, 1.0) * draw.random(),
            "unscored_fraction": 0.0,
            "kl": noisy(0.01, 0.7) if reused and moves else 0.0,
            "ref_kl": noisy(0.6 * progress, 0.3) if moves else 0.0,
            "target_kl_gap": noisy(0.002, 1.0) if step > head_start else 0.0,
            "entropy": noisy(2.0 * (1 - progress) + (0.002 if solved else 0.5), 0.15),
            "clip_fraction": min(noisy(0.13, 0.4), 1.0) if reused and moves else 0.0,
            "ratio_max": 1 + noisy(3.0, 0.8) if reused and moves else 1.0,
            "loss": draw.gauss(0, 0.1),
            "grad_norm": noisy(0.5, 0.5),
            "learning_rate": 1e-5,
            "completions/mean_length": noisy(8 if solved else 20, 0.1),
            "completions/clipped_ratio": 0.9 if settings["max_completion_length"] <= 24 else noisy(0.1, 0.5),
            "completions/duplicate_fraction": 0.87 * progress if solved else min(noisy(0.05, 0.5), 1.0),
            "sampling_logprob_difference": noisy(0.01, 0.5),
        }
        if settings["algorithm"] == "ppo":
            row["loss/value"] = noisy(spread**2 * ((0.3 if moves else 0.1) + 0.7 * math.exp(-step / 20)), 0.3)
            row["explained_variance"] = (0.5 * progress if moves else 0.8) + draw.gauss(0, 0.15)
            row["reward_kl/k1"] = k1_of_a_step(draw, row["ref_kl"])
            row["updates_skipped"] = 0.0
        if step % 10 == 0:
            row["eval/reward"] = mean - 0.05 + draw.gauss(0, 0.03)
        rows.append(row)
    return rows


def k1_of_a_step(draw: random.Random, kl: float, tokens: int = 640) -> float:
    """Mean log-ratio of sampled tokens, whose variance is 2 KL for normal distributions that differ in their mean."""
    return draw.gauss(kl, math.sqrt(2 * kl / tokens))


def examine(settings: dict, rows: list[dict[str, float]]) -> list[Finding]:
    doctor = Doctor(settings)
    return [finding for row in rows for finding in doctor.observe(row)]


def serious(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings if finding.severity != "note"}


def with_changes(rows: list[dict[str, float]], start: int, **changes: float) -> list[dict[str, float]]:
    """The rows with some values replaced from row `start` on; in a name, __ stands for the slash."""
    changes = {name.replace("__", "/"): value for name, value in changes.items()}
    return [row if index < start else {**row, **changes} for index, row in enumerate(rows)]


@pytest.mark.parametrize("shape", [{}, {"solved": True}, {"sparse": True}], ids=["plain", "solved", "sparse"])
@pytest.mark.parametrize(
    "settings", [GRPO, PPO, HEAD_START, QUICKSTART], ids=["grpo", "ppo", "ppo-critic-first", "quickstart"]
)
def test_healthy_runs_have_neither_warnings_nor_errors(settings: dict, shape: dict) -> None:
    for seed in range(10):
        findings = examine(settings, healthy_run(seed, settings, **shape))
        assert serious(findings) == set(), [finding.message for finding in findings]


def test_short_completions_that_are_mostly_cut_off_get_one_note() -> None:
    findings = examine(QUICKSTART, healthy_run(0, QUICKSTART))
    assert [(finding.rule, finding.severity, finding.action) for finding in findings] == [
        ("completions_cut_off", "note", "note")
    ]


def test_completions_of_a_fixed_length_are_cut_off_by_design() -> None:
    settings = {**GRPO, "min_completion_length": 256}
    rows = with_changes(healthy_run(0, settings), 0, completions__clipped_ratio=1.0)
    assert "completions_cut_off" not in {finding.rule for finding in examine(settings, rows)}


SICK = {
    "kl_jump": (GRPO, 100, {"kl": 1.5}),
    "non_finite": (GRPO, 100, {"loss": math.nan}),
    "ratio_blow_up": (GRPO, 100, {"ratio_max": 500.0}),
    "clip_fraction_high": (GRPO, 50, {"clip_fraction": 0.45}),
    "explained_variance_negative": (PPO, 50, {"explained_variance": -0.8}),
    "value_loss_unsettled": (PPO, 150, {"loss__value": 5.0}),
    "value_gradient_drowns_policy": (
        {**PPO, "max_grad_norm": 1.0},
        100,
        {"value_grad_norm": 1e4, "grad_norm": 1.0001e4},
    ),
    "updates_left_out": (PPO, 100, {"updates_skipped": 1.0}),
    "kl_negative": (PPO, 100, {"reward_kl__k1": -0.05}),
    "target_not_moving": (GRPO, 1, {"target_kl_gap": 0.0}),
    "reward_crashed": (GRPO, 150, {"reward": 0.05}),
    "groups_tied": (GRPO, 0, {"frac_reward_zero_std": 0.95, "reward": 0.0}),
    "reward_outlier": (GRPO, 199, {"reward_std": 60.0}),
    "many_unscored": (GRPO, 100, {"unscored_fraction": 0.4}),
    "completions_cut_off": (GRPO, 100, {"completions__clipped_ratio": 0.8}),
    "duplicate_completions": (GRPO, 100, {"completions__duplicate_fraction": 0.7}),
    "entropy_collapse": (GRPO, 30, {"entropy": 0.01, "reward": 0.2}),
    "sampler_disagrees": (GRPO, 100, {"sampling_logprob_difference": 0.4}),
    "reward_flat": (GRPO, 0, {"reward": 0.3}),
}


@pytest.mark.parametrize("rule", SICK)
def test_a_sick_run_is_named_by_its_rule_soon_after_it_falls_ill(rule: str) -> None:
    settings, start, changes = SICK[rule]
    findings = [
        finding
        for finding in examine(settings, with_changes(healthy_run(3, settings), start, **changes))
        if finding.rule == rule and finding.severity != "note"
    ]
    assert findings, f"{rule} did not fire"
    allowed = 110 if rule == "reward_flat" else 25
    assert start <= findings[0].step <= start + allowed
    assert all(math.isfinite(number) for number in findings[0].evidence.values())


def test_every_rule_has_a_sick_run_that_triggers_it() -> None:
    assert {rule.name for rule in RULES} == {*SICK, "heldout_fell", "clip_fraction_low"}


def test_training_reward_that_rises_while_held_out_reward_falls_is_found() -> None:
    """S57: a loophole in the reward shows as a gap between the two curves."""
    rows = healthy_run(0, GRPO)
    for row in rows:
        row["reward"] = 0.2 + 0.003 * row["step"]
        if "eval/reward" in row:
            row["eval/reward"] = 0.2 + 0.004 * min(row["step"], 100) - 0.006 * max(row["step"] - 100, 0)
    findings = [finding for finding in examine(GRPO, rows) if finding.rule == "heldout_fell"]
    assert findings and findings[0].step > 100
    assert findings[0].action == "checkpoint"


def test_held_out_reward_that_falls_together_with_training_reward_is_not_a_loophole() -> None:
    rows = healthy_run(0, GRPO)
    for row in rows:
        row["reward"] = 0.5 + 0.004 * min(row["step"], 100) - 0.006 * max(row["step"] - 100, 0)
        if "eval/reward" in row:
            row["eval/reward"] = row["reward"]
    assert "heldout_fell" not in serious(examine(GRPO, rows))


def test_the_clip_band_is_silent_where_a_rollout_is_used_once() -> None:
    """W7: with one update per rollout the clip fraction is 0 by definition."""
    once = {**GRPO, "num_epochs": 1, "num_mini_batches": 1}
    for fraction in (0.0, 0.9):
        rows = with_changes(healthy_run(0, once), 0, clip_fraction=fraction)
        assert not {"clip_fraction_low", "clip_fraction_high"} & {finding.rule for finding in examine(once, rows)}


def test_the_clip_band_waits_for_the_end_of_warm_up() -> None:
    """S59: `warmup_steps` below 1 is a fraction of the run, here 100 of 200 steps."""
    settings = {**GRPO, "warmup_steps": 0.5}
    findings = examine(settings, with_changes(healthy_run(0, settings), 0, clip_fraction=0.5))
    assert min(finding.step for finding in findings if finding.rule == "clip_fraction_high") == 109


def test_a_clip_fraction_that_stays_low_is_a_note_and_nothing_more() -> None:
    findings = examine(GRPO, with_changes(healthy_run(0, GRPO), 0, clip_fraction=0.01))
    assert [finding.severity for finding in findings if finding.rule == "clip_fraction_low"][:1] == ["note"]
    assert serious(findings) == set()


def test_kl_that_climbs_steadily_is_not_a_jump() -> None:
    """S58: only a leap is a sign of collapse; KL to the reference grows in every run that learns."""
    rows = healthy_run(0, GRPO)
    for row in rows:
        row["ref_kl"] = 0.001 * 1.04 ** row["step"]
    assert rows[-1]["ref_kl"] > 2
    assert "kl_jump" not in {finding.rule for finding in examine(GRPO, rows)}


def test_one_freak_reading_of_the_reference_kl_is_not_a_jump_but_a_lasting_one_is() -> None:
    healthy = healthy_run(0, GRPO)
    freak = [{**row, "ref_kl": 8.0} if row["step"] == 100 else row for row in healthy]
    assert "kl_jump" not in serious(examine(GRPO, freak))
    assert "kl_jump" in serious(examine(GRPO, with_changes(healthy, 100, ref_kl=8.0)))


def test_a_value_loss_that_grows_with_the_spread_of_rewards_is_healthy() -> None:
    """S60: first successes widen the returns; the same critic then has a larger loss."""
    rows = healthy_run(0, PPO)
    for row in rows:
        row["reward_std"] = 0.05 if row["step"] < 80 else 0.5
        row["loss/value"] = 0.4 * row["reward_std"] ** 2
    assert "value_loss_unsettled" not in {finding.rule for finding in examine(PPO, rows)}


def fired(settings: dict, rows: list[dict[str, float]], rule: str) -> list[Finding]:
    return [finding for finding in examine(settings, rows) if finding.rule == rule]


@pytest.mark.parametrize("tokens", [64, 640, 10_000])
@pytest.mark.parametrize("kl", [0.0, 1e-4, 0.003, 0.01, 0.05, 0.5])
def test_kl_that_is_negative_by_chance_is_not_reported(kl: float, tokens: int) -> None:
    """The policy is near the reference, so that k1 falls on either side of 0 from step to step."""
    draw = random.Random(0)
    rows = [{"step": step, "reward_kl/k1": k1_of_a_step(draw, kl, tokens)} for step in range(1000)]
    if 0 < kl * tokens < 2:
        assert min(row["reward_kl/k1"] for row in rows) < 0
    assert fired(PPO, rows, "kl_negative") == []


def test_one_step_of_very_negative_kl_is_not_reported() -> None:
    rows = [{"step": step, "reward_kl/k1": -3.0 if step == 50 else 0.02} for step in range(100)]
    assert fired(PPO, rows, "kl_negative") == []


@pytest.mark.parametrize("mean, reported", [(-0.008, False), (-0.02, True)])
def test_a_mean_kl_clearly_below_zero_is_reported(mean: float, reported: bool) -> None:
    """The limit is a hundredth of a nat a token."""
    draw = random.Random(0)
    rows = [{"step": step, "reward_kl/k1": mean + draw.gauss(0, 0.002)} for step in range(60)]
    assert bool(fired(PPO, rows, "kl_negative")) == reported


def test_a_finding_of_negative_kl_says_what_k1_is_and_what_to_do() -> None:
    rows = [{"step": step, "reward_kl/k1": -0.05} for step in range(10)]
    (finding,) = fired({**PPO, "top_p": 0.9, "top_k": 0, "min_p": None}, rows, "kl_negative")
    assert finding.step == 9  # fewer than ten steps are no average
    assert finding.message == "reward_kl/k1 averages -0.05 nats a token over 10 steps, sampled with top_p=0.9"
    assert "KL may be negative under k1." in finding.meaning
    assert "unbiased" in finding.meaning
    assert "`kl_estimator: exact`" in finding.advice
    assert "`top_p: 1`" in finding.advice


def test_the_other_estimators_of_kl_are_not_judged_by_the_rule_for_k1() -> None:
    rows = [{"step": step, "reward_kl/exact": -0.05, "loss_kl/k2": -0.05, "kl": 0.0} for step in range(20)]
    assert fired(PPO, rows, "kl_negative") == []


@pytest.mark.parametrize("to_reference, reported", [(0.01, False), (-0.05, True)])
def test_k1_in_a_loss_is_judged_less_what_the_updates_moved_the_policy(to_reference: float, reported: bool) -> None:
    """Tokens are the old policy's: log(online / reference) averages KL(old || reference) - KL(old || online)."""
    rows = [{"step": step, "loss_kl/k1": to_reference - 0.1, "kl": 0.1} for step in range(20)]
    assert bool(fired(GRPO, rows, "kl_negative")) == reported


def test_left_out_updates_are_reported_once_and_again_when_they_have_doubled() -> None:
    rows = healthy_run(0, PPO)
    skips = {100: 1.0, 103: 1.0, 104: 2.0, 150: 1.0}
    rows = [{**row, "updates_skipped": skips.get(row["step"], 0.0)} for row in rows]
    findings = fired(PPO, rows, "updates_left_out")
    assert [finding.step for finding in findings] == [100, 103, 104]
    assert findings[-1].evidence == {"updates_skipped": 2.0, "in_last_10_steps": 4.0, "limit": 10.0}


def test_an_old_left_out_update_is_not_the_news_of_later_steps() -> None:
    """Also where later rows do not have the number at all."""
    rows = [{"step": 0, "updates_skipped": 1.0}, *({"step": step} for step in range(1, 150))]
    assert [finding.step for finding in fired(PPO, rows, "updates_left_out")] == [0]


LONG_HEAD_START = {**PPO, "value_warmup_steps": 120}


def test_a_reward_that_is_flat_because_only_the_critic_learns_is_not_reported() -> None:
    """W7's rule for more than the clip band: 120 of 200 steps leave the policy as it is."""
    rows = healthy_run(0, LONG_HEAD_START)
    assert fired(LONG_HEAD_START, rows, "reward_flat") == []
    assert fired({**LONG_HEAD_START, "value_warmup_steps": 0}, rows, "reward_flat") != []


def test_a_reward_that_stays_flat_after_the_critics_head_start_is_reported_half_way_through_the_rest() -> None:
    settings = {**PPO, "value_warmup_steps": 50, "max_steps": 250}
    rows = with_changes(healthy_run(0, settings), 0, reward=0.3)
    assert fired(settings, rows, "reward_flat")[0].step == 50 + 100 - 1


def test_the_clip_band_waits_until_the_policy_moves() -> None:
    rows = healthy_run(0, LONG_HEAD_START)
    assert fired(LONG_HEAD_START, rows, "clip_fraction_low") == []
    assert fired({**LONG_HEAD_START, "value_warmup_steps": 0}, rows, "clip_fraction_low") != []
    overshoots = with_changes(rows, 120, clip_fraction=0.5)
    assert fired(LONG_HEAD_START, overshoots, "clip_fraction_high")[0].step == 129


def test_a_target_policy_does_not_move_while_only_the_critic_learns() -> None:
    """Gradients flow then, but those of the value model."""
    rows = healthy_run(0, LONG_HEAD_START)
    assert fired(LONG_HEAD_START, rows, "target_not_moving") == []
    stuck = with_changes(rows, 0, target_kl_gap=0.0)
    assert fired(LONG_HEAD_START, stuck, "target_not_moving")[0].step == 129


def test_the_first_steps_of_a_policy_are_not_compared_with_the_zeros_of_its_critics_head_start() -> None:
    rows = healthy_run(0, HEAD_START)
    for row, kl in zip(rows[60:], (0.7, 0.6, 0.4, 0.2)):
        row["kl"] = row["ref_kl"] = kl
    assert fired(HEAD_START, rows, "kl_jump") == []
    assert fired({**HEAD_START, "value_warmup_steps": 0}, rows, "kl_jump")[0].step == 60
    assert fired(HEAD_START, with_changes(rows, 60, kl=4.0), "kl_jump")[0].step == 60
    assert fired(HEAD_START, with_changes(rows, 100, kl=1.5), "kl_jump")[0].step == 100


def test_a_critic_that_follows_a_moving_policy_less_well_than_a_standing_one_is_healthy() -> None:
    """S60: a loss that levels off higher than in the head start has settled all the same."""
    rows = healthy_run(0, HEAD_START)
    for row in rows:
        row["reward_std"], row["loss/value"] = 0.4, 0.01 if row["step"] < 60 else 0.05
    assert fired(HEAD_START, rows, "value_loss_unsettled") == []
    assert fired({**HEAD_START, "value_warmup_steps": 0}, rows, "value_loss_unsettled") != []
    diverges = with_changes(rows, 150, loss__value=0.4)
    assert fired(HEAD_START, diverges, "value_loss_unsettled")[0].step < 160


def test_a_critic_that_is_worse_than_a_constant_is_reported_during_its_head_start() -> None:
    rows = with_changes(healthy_run(0, LONG_HEAD_START), 0, explained_variance=-0.5)
    assert fired(LONG_HEAD_START, rows, "explained_variance_negative")[0].step < 120


def test_critic_rules_wait_for_the_value_models_own_warm_up() -> None:
    """S60: `value_lr_warmup_steps`, or `warmup_steps` (here 10 steps) where it is unset."""
    rows = with_changes(healthy_run(0, PPO), 0, explained_variance=-0.5)
    for own, first in ((None, 49), (0, 39), (60, 99), (0.5, 139)):
        found = fired({**PPO, "value_lr_warmup_steps": own}, rows, "explained_variance_negative")
        assert found[0].step == first


def test_a_fresh_critic_that_explains_nothing_yet_is_healthy() -> None:
    """A head of zeros has an explained variance of 0, give or take the noise of small batches."""
    for seed in range(10):
        rows, draw = healthy_run(seed, PPO), random.Random(seed)
        for row in rows:
            row["explained_variance"] = 0.0 if row["step"] < 10 else draw.gauss(0, 0.15)
        assert fired(PPO, rows, "explained_variance_negative") == []


def test_a_critic_of_a_solved_task_has_nothing_left_to_explain() -> None:
    """Returns hardly vary, so that any error is large beside their variance: a note, unless nothing was learnt."""
    rows = healthy_run(0, PPO)
    solved = with_changes(rows, 120, reward=1.0, reward_std=0.02, explained_variance=-3.0)
    assert [finding.severity for finding in fired(PPO, solved, "explained_variance_negative")] == ["note"]
    for changes in ({"reward": 0.2, "reward_std": 0.02}, {"reward": 0.7, "reward_std": 0.4}):
        sick = with_changes(rows, 0, **changes, explained_variance=-3.0)
        sick = [{**row, "reward_std": 0.4, "reward": 0.2} if row["step"] < 10 else row for row in sick]
        assert "explained_variance_negative" in serious(examine(PPO, sick))


def test_a_value_loss_of_scaled_scores_is_judged_by_the_scaled_spread() -> None:
    """S50: scores are divided by `score_std`, so that raw rewards spread ten times wider excuse no larger loss."""
    rows = healthy_run(0, PPO)
    for row in rows:
        wide = row["step"] >= 100
        row["reward_std"] = 4.0 if wide else 0.4
        row["loss/value"] = 2.0 if wide else 0.2
    assert fired(PPO, rows, "value_loss_unsettled") == []
    scaled = [{**row, "score_std": row["reward_std"]} for row in rows]
    assert fired(PPO, scaled, "value_loss_unsettled") != []


@pytest.mark.parametrize("rule", ["value_loss_unsettled", "explained_variance_negative"])
def test_advice_about_the_critic_names_its_settings_and_no_fixed_ratio(rule: str) -> None:
    """S50, W6."""
    (advice,) = (item.advice for item in RULES if item.name == rule)
    names = ("value_learning_rate", "value_warmup_steps", "value_max_grad_norm", "scale_rewards: running")
    for name in (*names, "value_model: separate"):
        assert f"`{name}`" in advice
    assert "times" not in advice


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"value_max_grad_norm": 1.0}, {"value_grad_norm": 1e4, "grad_norm": 1.0001e4}),  # clipped by itself
        ({}, {"value_grad_norm": 40.0, "grad_norm": 80.0}),  # the policy has its half
        ({}, {"value_grad_norm": 1.99, "grad_norm": 2.0}),  # clipping takes half: no more than usual
        ({"max_grad_norm": None}, {"value_grad_norm": 1e4, "grad_norm": 1e4}),  # nothing is clipped
    ],
)
def test_a_large_gradient_of_the_critic_is_healthy_where_it_takes_nothing_from_the_policy(settings, changes) -> None:
    settings = {**PPO, "max_grad_norm": 1.0, **settings}
    rows = with_changes(healthy_run(2, settings), 100, **changes)
    assert fired(settings, rows, "value_gradient_drowns_policy") == []


def test_tied_groups_do_not_concern_algorithms_without_a_group_baseline() -> None:
    rows = with_changes(healthy_run(0, PPO), 0, frac_reward_zero_std=1.0)
    for settings in (PPO, {**PPO, "num_generations": 8}):
        assert "groups_tied" not in {finding.rule for finding in examine(settings, rows)}


def test_the_noise_of_small_batches_is_not_a_crash() -> None:
    """Four completions a step: a step's mean strays by half the spread of single rewards."""
    rows, draw = healthy_run(0, GRPO), random.Random(0)
    for row in rows:
        row["reward"], row["reward_std"] = draw.gauss(0.5, 0.1), 0.2
    assert "reward_crashed" not in {finding.rule for finding in examine(GRPO, rows)}


def test_a_gap_of_zero_is_no_news_while_no_gradient_flows() -> None:
    rows = with_changes(healthy_run(0, GRPO), 0, target_kl_gap=0.0, grad_norm=0.0)
    assert "target_not_moving" not in {finding.rule for finding in examine(GRPO, rows)}


def test_a_finding_is_repeated_only_after_the_cool_down_or_at_twice_the_size() -> None:
    rows = healthy_run(0, {**GRPO, "max_steps": 400})
    steady = with_changes(rows, 100, unscored_fraction=0.3)
    steps = [f.step for f in examine(GRPO, steady) if f.rule == "many_unscored"]
    assert [later - steps[0] for later in steps] == [0, 100, 200]
    worse = with_changes(steady, 120, unscored_fraction=0.7)
    assert len([f for f in examine(GRPO, worse[:150]) if f.rule == "many_unscored"]) == 2


def test_a_note_is_given_once_and_repeated_only_when_it_turns_serious() -> None:
    """Entropy falls while the reward is up, falls further, and then the reward goes too."""
    rows = with_changes(healthy_run(0, {**GRPO, "max_steps": 400}), 200, entropy=0.01)
    rows = with_changes(with_changes(rows, 230, entropy=0.0001), 300, reward=0.1)
    found = [(f.step < 300, f.severity) for f in examine(GRPO, rows) if f.rule == "entropy_collapse"]
    assert found == [(True, "note"), (False, "warn")]


def test_non_finite_numbers_are_an_error_and_do_not_poison_later_judgements() -> None:
    rows = healthy_run(0, GRPO)
    rows[50] = {**rows[50], "loss": math.nan, "reward": math.nan, "kl": math.inf, "rewards/format/mean": math.nan}
    findings = [finding for finding in examine(GRPO, rows) if finding.severity != "note"]
    assert [(f.rule, f.step, f.action, f.evidence) for f in findings] == [
        ("non_finite", 50, "checkpoint", {"non_finite_metrics": 3})
    ]
    assert "kl, loss, reward" in findings[0].message


@pytest.mark.parametrize("name", ["loss/value", "value_grad_norm", "reward_kl/k1", "loss_kl/exact"])
def test_a_number_that_steers_critic_or_reward_must_be_finite(name: str) -> None:
    rows = [{**row, name: math.nan} if row["step"] == 50 else row for row in healthy_run(0, PPO)]
    assert [finding.step for finding in fired(PPO, rows, "non_finite")] == [50]


def test_a_restored_doctor_finds_what_an_unbroken_one_finds() -> None:
    """The state survives JSON, so that it can travel in a checkpoint."""
    rows = with_changes(healthy_run(1, PPO), 90, reward=0.0, kl=4.0, loss__value=9.0)
    unbroken = Doctor(PPO)
    expected = [finding for row in rows for finding in unbroken.observe(row)]
    first, second = Doctor(PPO), Doctor(PPO)
    found = [finding for row in rows[:95] for finding in first.observe(row)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [finding for row in rows[95:] for finding in second.observe(row)]
    assert found == expected and len(expected) > 3


def test_a_tensor_of_one_element_counts_as_its_number() -> None:
    rows = [{**row, "kl": torch.tensor(4.0 if row["step"] == 30 else row["kl"])} for row in healthy_run(0, GRPO)[:40]]
    assert serious(examine(GRPO, rows)) == {"kl_jump"}


def test_the_last_zero_values_of_a_metric_are_none_of_them() -> None:
    history = History({})
    history.add({"step": 0, "kl": 1.0})
    assert (history.recent("kl", 0), history.recent("kl", 1)) == ([], [1.0])


def test_a_row_without_a_step_is_refused() -> None:
    with pytest.raises(DataError, match="'step'"):
        Doctor(GRPO).observe({"reward": 1.0})


def write_run(folder, settings: dict, rows: list[dict], tail: str = "") -> None:  # type: ignore[no-untyped-def]
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def test_examining_a_folder_equals_watching_the_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Also where the run was killed while it wrote, and where steps were trained again after a resume."""
    rows = with_changes(healthy_run(2, GRPO), 120, loss=math.nan, reward=0.0)
    written = [{**row, "loss": row["loss"] if math.isfinite(row["loss"]) else None} for row in rows]
    write_run(tmp_path / "run", GRPO, [*written[:60], *written[50:]], tail='{"step": 200, "rew')
    findings = examine_run(tmp_path / "run")
    assert findings == examine(GRPO, rows)
    assert json.loads(json.dumps(asdict(findings[0]), allow_nan=False))["rule"] == findings[0].rule


def test_rows_written_before_a_resume_and_beyond_it_are_forgotten(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A run that reached step 2 was resumed at step 1, and evaluated there after the row was written."""
    lines = [{"step": 0, "reward": 0}, {"step": 1, "reward": 1}, {"step": 2, "reward": 2}]
    write_run(tmp_path, GRPO, [*lines, {"step": 1, "reward": 5}, {"step": 1, "eval/reward": 6}], tail="[]\n{")
    metrics = read_metrics(tmp_path)
    assert metrics.rows == [{"step": 0, "reward": 0}, {"step": 1, "reward": 5, "eval/reward": 6}]
    assert metrics.damaged_lines == 2


def test_a_missing_file_or_an_empty_run_is_an_error_that_names_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        examine_run(tmp_path)
    write_run(tmp_path, GRPO, [])
    with pytest.raises(DataError, match="no step yet"):
        examine_run(tmp_path)
    write_run(tmp_path, GRPO, [{"step": 0, "reward": 1.0}])
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(DataError, match=r"no config\.yaml"):
        examine_run(tmp_path)
