"""benchmarks/tiny_step.py: both sides do the same arithmetic, and the report says what was measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from quintain.monitor.statistics import StepStatistics
from quintain.reproduce.task import exact_reversal, reversal_network

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "tiny_step.py"
LENGTH = 3
ALGORITHMS = ("tpo", "grpo")


def load_script():
    spec = importlib.util.spec_from_file_location("tiny_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_step"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


tiny_step = load_script()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Eight prompts a step, on the processor."""
    monkeypatch.setattr(tiny_step, "PROMPTS", 8)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    torch.manual_seed(0)


@pytest.fixture
def make_sides(tmp_path):
    """The library's trainer and the plain loop, on equal weights, of which none is 0 or 1 as at the start."""

    def make(algorithm, learning_rate=1e-3):
        network = reversal_network(LENGTH, seed=0)
        for weight in network.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
        plain = tiny_step.PlainLoop(algorithm, network, LENGTH, learning_rate)
        trainer = tiny_step.build_trainer(
            algorithm, network, LENGTH, steps=2, seed=0, output_dir=str(tmp_path), learning_rate=learning_rate
        )
        return trainer, plain

    return make


def sampled(trainer):
    """Rollouts with rewards of 0 and 1, among them a group of zeros and one of ones."""
    rollouts = trainer.score(trainer.generate_rollouts())
    rewards = torch.randint(2, (len(rollouts),)).float()
    rewards[: tiny_step.GROUP], rewards[tiny_step.GROUP : 2 * tiny_step.GROUP] = 0, 1
    return rollouts.replace(rewards=rewards)


def in_plain_names(trainer):
    return {name: value.detach().clone() for name, value in tiny_step.weights_of(trainer.model).items()}


# ---- the same arithmetic ------------------------------------------------------------------------------------------


def test_log_probabilities_of_both_sides_agree(make_sides):
    trainer, plain = make_sides("tpo")
    rollouts = trainer.generate_rollouts()
    library = trainer.policies.online(rollouts).logprobs
    torch.testing.assert_close(
        plain.model.logprobs(rollouts.prompt_ids, rollouts.completion_ids), library, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_of_both_sides_agree_away_from_the_policy_that_sampled(make_sides, monkeypatch, algorithm):
    """Old log-probabilities lie 0.3 nats away, so that GRPO clips and its KL pulls."""
    trainer, plain = make_sides(algorithm)
    rollouts = sampled(trainer)
    with torch.no_grad():
        logprobs = plain.model.logprobs(rollouts.prompt_ids, rollouts.completion_ids)
    old = logprobs + 0.3 * torch.randn_like(logprobs)

    monkeypatch.setattr(trainer.optimizer, "step", lambda leave_out: {})
    trainer.train_minibatch(trainer.estimate(rollouts.replace(old_logprobs=old)), StepStatistics())
    for weight in trainer.model.parameters():
        weight.data = weight.grad
    scores = tiny_step.standardised(rollouts.rewards.view(-1, tiny_step.GROUP))
    plain.loss(plain.model.logprobs(rollouts.prompt_ids, rollouts.completion_ids), old, scores).backward()

    library = in_plain_names(trainer)
    whole = torch.stack([gradient.norm() for gradient in library.values()]).norm()
    assert whole > 0.1
    for name, weight in plain.model.named_parameters():
        # A key's bias adds the same to all of a query's logits: its gradient is rounding, beside the whole.
        allowed = 1e-4 * weight.grad.norm() + 1e-6 * whole
        assert (library[name] - weight.grad).norm() <= allowed, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_four_epochs_move_the_weights_of_both_sides_alike(make_sides, monkeypatch, algorithm):
    """Muon computes in bfloat16, so that hardly two digits of its updates can agree."""
    trainer, plain = make_sides(algorithm)
    rollouts = sampled(trainer)
    before, passes = in_plain_names(trainer), []
    online = trainer.policies.online
    monkeypatch.setattr(trainer.policies, "online", lambda rollouts: passes.append(len(rollouts)) or online(rollouts))
    trainer.fit(rollouts)
    plain.fit(rollouts.prompt_ids, rollouts.completion_ids, rollouts.rewards)
    assert passes == [len(rollouts)] * 4
    after = in_plain_names(trainer)
    for name, weight in plain.model.named_parameters():
        if name.endswith("key.bias"):  # no gradient but rounding, which AdamW makes whole steps of
            continue
        step = after[name] - before[name]
        by_muon = name.startswith("blocks.") and weight.ndim == 2
        assert (weight - after[name]).norm() <= (0.15 if by_muon else 1e-3) * step.norm(), name
        assert step.norm() > 0, name


@torch.no_grad()
def test_token_by_token_with_the_cache_the_plain_network_computes_what_it_does_at_once():
    model = tiny_step.PlainTransformer(LENGTH)
    ids = torch.randint(2, (4, 2 * LENGTH))
    hidden, past = model(ids[:, :2])
    states = [hidden]
    for place in range(2, 2 * LENGTH):
        hidden, past = model(ids[:, place : place + 1], past)
        states.append(hidden)
    torch.testing.assert_close(torch.cat(states, dim=1), model(ids)[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_what_the_plain_loop_samples_with_its_cache_is_what_a_whole_pass_expects():
    """With a head so sharp that it leaves nothing to chance."""
    model = tiny_step.PlainTransformer(LENGTH)
    model.head.weight.data *= 1e4
    prompts = torch.randint(2, (8, LENGTH))
    completions = model.sample(prompts)
    prompts = prompts.repeat_interleave(tiny_step.GROUP, dim=0)
    assert len(completions.unique(dim=0)) > 1
    assert float(model.logprobs(prompts, completions).min()) > -0.01


def test_the_plain_loop_samples_tokens_as_often_as_they_are_likely(make_sides):
    model = make_sides("tpo")[1].model
    prompts = torch.zeros(500, LENGTH, dtype=torch.long)
    ones = model.sample(prompts)[:, :1].float()
    probability = float(model.logprobs(prompts[:1], torch.ones_like(prompts[:1]))[0, 0].detach().exp())
    assert 0.05 < probability < 0.95
    assert float(ones.mean()) == pytest.approx(probability, abs=4 * (0.25 / len(ones)) ** 0.5)


def test_the_plain_loop_rewards_what_the_reward_function_rewards(make_sides, monkeypatch):
    plain, calls = make_sides("tpo")[1], []
    monkeypatch.setattr(plain, "fit", lambda *arguments: calls.append(arguments))
    plain.step()
    prompts, completions, rewards = calls[0]
    texts, answers = (["".join(map(str, row)) for row in ids.tolist()] for ids in (completions, prompts.flip(1)))
    assert rewards.tolist() == exact_reversal(texts, answers)
    assert {0.0, 1.0} == set(rewards.tolist())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_policy_stands_still_while_it_is_measured(make_sides, algorithm):
    trainer, plain = make_sides(algorithm, tiny_step.STANDSTILL)
    before = in_plain_names(trainer)
    trainer.run_step()
    plain.step()
    for after in (in_plain_names(trainer), dict(plain.model.named_parameters())):
        assert max(float((after[name] - before[name]).detach().abs().max()) for name in before) < 1e-6


# ---- what is reported ---------------------------------------------------------------------------------------------

WORK = {"library_work": tiny_step.Work(60, 5), "plain_work": tiny_step.Work(1400, 6)}


def result(library, plain, case="start"):
    """Turns from lists of (seconds on the clock, seconds of the processor)."""
    turns = [
        [tiny_step.Turn([wall for wall, _ in turn], [cpu for _, cpu in turn]) for turn in side]
        for side in (library, plain)
    ]
    return tiny_step.Result("tpo", case, *turns, **WORK)


def report(*results):
    return tiny_step.report(results, argparse.Namespace(length=7, pairs=2, steps=2))


def test_the_ratio_is_of_medians_over_all_steps_and_its_range_is_of_pairs():
    """Library 2, 2, 4, 3: median 2.5, pairs 4 / 4 and 7 / 2. Plain 1, 3, 1, 1: median 1."""
    library = [[(2.0, 2.0), (2.0, 2.0)], [(4.0, 3.8), (3.0, 3.0)]]
    plain = [[(1.0, 1.0), (3.0, 3.0)], [(1.0, 1.0), (1.0, 1.0)]]
    text = report(result(library, plain))
    (row,) = [line for line in text.splitlines() if line.startswith("| tpo")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:4] == ["2.500 (2.000 to 3.250)", "1.000 (1.000 to 1.500)"]
    assert cells[4:6] == ["2.50 (1.00 to 3.50)", "2.50 (1.00 to 3.40)"]
    assert cells[6:] == ["60 / 1,400", "5 / 6"]
    assert "tpo within 1.3 x the plain loop: no (2.50 on the clock)" in text and "warning" not in text


def test_a_disturbed_measurement_is_told_and_judged_by_processor_time():
    """A fifth of one turn's seconds went elsewhere; a twentieth does not count."""
    quiet, disturbed = [(1.0, 0.95)], [(1.5, 1.2)]
    text = report(result([disturbed, quiet], [quiet, quiet]))
    assert "warning: tpo, start: in 1 of 4 turns" in text
    assert "tpo within 1.3 x the plain loop: yes (1.13 of processor time)" in text


def test_only_the_start_is_held_to_the_limit():
    assert "within" not in report(result([[(9.0, 9.0)]], [[(1.0, 1.0)]], case="converged"))


def test_waiting_shows_as_seconds_on_the_clock_only():
    turn = tiny_step.take_turn(lambda: time.sleep(0.02), 3)
    assert len(turn.wall) == len(turn.cpu) == 3
    assert min(turn.wall) >= 0.02 > max(turn.cpu) and turn.disturbed


@pytest.mark.parametrize("options", [["--cases", "start,end"], ["--algorithms", "ppo"], ["--pairs", "0"]])
def test_a_wrong_option_is_refused_before_anything_runs(capsys, options):
    with pytest.raises(SystemExit):
        tiny_step.main(options)
    assert options[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_measures_every_case_that_was_asked_for(tmp_path, capsys):
    file = tmp_path / "tiny.json"
    cases = "start,start-unshared,converged"
    tiny_step.main(f"--length 3 --pairs 2 --steps 1 --algorithms grpo --cases {cases} --json {file}".split())
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert [(found["algorithm"], found["case"]) for found in results] == [("grpo", case) for case in cases.split(",")]
    assert "grpo within 1.3 x the plain loop: " in printed
    for found in results:
        assert f"| grpo | {found['case']} |" in printed
        for side in ("library", "plain"):
            assert [len(turn["wall"]) for turn in found[side]] == [1, 1]
            assert min(min(turn["wall"]) for turn in found[side]) > 0
        assert found["plain_work"]["tokens"] == 8 * 8 * 5
    start, unshared, converged = (found["library_work"] for found in results)
    assert unshared["tokens"] >= 5 * unshared["distinct"] and start["tokens"] < unshared["tokens"]
    assert unshared["distinct"] == start["distinct"] and converged["distinct"] < 0.7 * start["distinct"]
