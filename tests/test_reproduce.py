"""`quintain reproduce`: the paper's task and algorithms, runs that go on where they stopped, and tables by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from quintain.cli.main import main
from quintain.configs.algorithms import GRPOConfig, TPOConfig
from quintain.errors import ConfigError, DataError
from quintain.reproduce import jobs as jobs_module
from quintain.reproduce import runs as runs_module
from quintain.reproduce import task
from quintain.reproduce.algorithms import ALGORITHMS, find_algorithm
from quintain.reproduce.jobs import Job, Result
from quintain.reproduce.paper import TABLE_3, reported
from quintain.reproduce.plan import FIGURES, plan, table_3
from quintain.reproduce.published_muon import PublishedMuon
from quintain.reproduce.results import AXES, error_around, steps_to, tables, worst_after, write_results
from quintain.reproduce.runs import finished, run, run_jobs
from quintain.reproduce.variants import (
    CriticFreePPO,
    GroupPG,
    SequenceGRPO,
    TPOWithoutAnchor,
    TPOWithoutTies,
)
from quintain.types import PolicyOutputs, Rollouts

SMALL = Job("tpo", length=2, seed=0, episodes=4, prompts=4, group_size=4)


# ---- the task ---------------------------------------------------------------------------------------------------


def test_the_published_optimizer_gives_muon_what_the_papers_code_gives_it():
    model = task.reversal_network(7, seed=0)
    optimizer = PublishedMuon(model, lr=1e-3)
    names = {id(parameter): name.removeprefix("model.decoder.") for name, parameter in model.named_parameters()}
    muon, adam = (
        {
            names[id(parameter)].removeprefix("model.decoder.")
            for group in part.param_groups
            for parameter in group["params"]
        }
        for part in (optimizer.muon, optimizer.adam)
    )
    assert {"embed_tokens.weight", "embed_positions.weight", "layers.0.fc1.weight", "lm_head.weight"} <= muon
    assert {"layers.0.self_attn.q_proj.weight", "layers.1.fc2.bias", "final_layer_norm.weight"} <= adam
    assert len(muon) + len(adam) == len(names)
    rates = {names[id(group["params"][0])]: group["lr"] for group in optimizer.param_groups}
    assert rates["embed_tokens.weight"] == pytest.approx(1e-3 * (64 / 2) ** 0.5)
    assert rates["embed_positions.weight"] == pytest.approx(1e-3 * (64 / 14) ** 0.5)


@pytest.mark.parametrize("optimizer", ["package", "published"])
def test_a_run_learns_with_either_optimizer(optimizer, tmp_path):
    """One bit copied: half of all answers are right by chance."""
    job = Job("tpo", length=1, seed=0, episodes=15, prompts=8, group_size=4, optimizer=optimizer)
    assert run(job, tmp_path).errors[-1] < 0.1


def test_prompts_are_drawn_with_repetition_and_answers_are_reversed():
    rows = list(task.reversal_prompts(3, number=400, seed=0))
    counts = [sum(row["prompt"] == format(number, "03b") for row in rows) for number in range(8)]
    assert min(counts) > 25 and max(counts) < 80  # 50 each on average, with a standard deviation of 7
    assert all(row["answer"] == row["prompt"][::-1] for row in rows)
    first_again = list(islice(task.reversal_prompts(3, number=400, seed=0), 5))
    assert first_again == rows[:5]
    assert list(islice(task.reversal_prompts(3, number=400, seed=1), 20)) != rows[:20]


def test_the_reward_is_for_the_whole_answer_only():
    assert task.exact_reversal(["011", "010", ""], answer=["011", "011", "011"]) == [1.0, 0.0, 0.0]


def test_noise_is_added_to_the_reward_and_is_the_same_again_in_the_same_step():
    reward, right = task.NoisyReversal(1e-3, seed=0), ["01"] * 1000
    logged = {}
    first, again, later = (
        reward(right, right, SimpleNamespace(global_step=step), logged.__setitem__) for step in (4, 4, 5)
    )
    assert logged == {"exact": 1.0}
    assert first == again != later
    noise = torch.tensor(first) - 1
    assert float(noise.std()) == pytest.approx(1e-3, rel=0.1) and abs(float(noise.mean())) < 2e-4


def test_the_network_can_write_nothing_but_the_two_symbols():
    model, tokenizer = task.reversal_network(5, seed=0), task.reversal_tokenizer()
    assert tokenizer("0110")["input_ids"] == [0, 1, 1, 0]
    assert min(tokenizer.pad_token_id, tokenizer.eos_token_id) >= 2
    assert model(torch.tensor([[0, 1]])).logits.shape == (1, 2, 2)


def test_the_network_has_the_shape_and_the_first_weights_of_the_papers():
    model = task.reversal_network(10, seed=0)
    layer = model.model.decoder.layers[0]
    assert len(model.model.decoder.layers) == 2 and layer.self_attn.num_heads == 2
    assert tuple(layer.fc1.weight.shape) == (256, 64)
    # 64 x 64 numbers: a sample standard deviation is within 1.1% of the truth two times in three.
    assert float(layer.self_attn.q_proj.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert float(layer.fc2.weight.detach().std()) == pytest.approx(1 / 16, rel=0.05)
    assert float(layer.fc1.weight.detach().abs().max()) <= 2 / 8 / 0.8796 + 1e-6
    assert float(model.model.decoder.embed_positions.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not any(bool(layer.fc1.bias.detach().any()) for layer in model.model.decoder.layers)


def test_the_seed_decides_the_first_weights_and_nothing_else_is_drawn():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, same, other = (task.reversal_network(4, seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


# ---- algorithms ---------------------------------------------------------------------------------------------------


def test_tpo_there_is_the_papers_own_setting(tmp_path):
    config = Job("tpo", 7, 0).config(tmp_path)
    paper = TPOConfig(group_logits="logprob", use_target_policy=False, beta=0.0)
    names = ("group_logits", "use_target_policy", "beta", "eta", "anchor", "loss_type", "group_std", "scale_rewards")
    assert [getattr(config, name) for name in names] == [getattr(paper, name) for name in names]
    assert (config.completions_per_step, config.num_epochs, config.max_steps) == (800, 4, 2000)
    assert (config.optim, config.learning_rate, config.max_grad_norm) == ("muon", 1e-3, None)


def test_grpo_there_is_restrained_to_the_policy_that_sampled(tmp_path):
    config = Job("grpo", 7, 0).config(tmp_path)
    assert (config.beta, config.reference_slot, config.kl_estimator) == (0.04, "old", "k3")
    assert (config.epsilon, config.group_std) == (0.2, "population")
    assert Job("grpo-no-kl", 7, 0).config(tmp_path).beta == 0


def test_dg_uses_a_rollout_once(tmp_path):
    assert Job("dg", 7, 0).config(tmp_path).num_epochs == 1


@pytest.mark.parametrize(("match", "prompts", "rate"), [("prompts", 100, 1e-3), ("interactions", 800, 1e-3 * 8**0.5)])
def test_algorithms_with_one_completion_a_prompt_are_matched(match, prompts, rate, tmp_path):
    config = Job("ppo", 7, 0, match=match).config(tmp_path)
    assert (config.prompts_per_step, config.num_generations) == (prompts, 1)
    assert config.learning_rate == pytest.approx(rate)
    assert Job("tpo", 7, 0, match=match).config(tmp_path).prompts_per_step == 100


def test_a_name_may_carry_settings(tmp_path):
    config = Job("tpo+group_logits=logratio+eta=0.5", 7, 0).config(tmp_path)
    assert (config.group_logits, config.eta, config.use_target_policy) == ("logratio", 0.5, False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tpoo", "got 'tpoo'. Did you mean 'tpo'"),
        ("tpo+eta", "field=value"),
        ("tpo+etta=1", "'etta' is not a setting of TPOConfig. Did you mean 'eta'"),
        ("tpo+eta=0", "eta must be"),
        ("tpo+eta=1+eta=2", "gives eta twice"),
        ("tpo+seed=5", "seed is decided by the experiment"),
        ("tpo+max_steps=3", "max_steps is decided by the experiment"),
        ("grpo+num_generations=1", "num_generations is decided by the experiment"),
    ],
)
def test_a_wrong_algorithm_is_refused(name, words, tmp_path):
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        Job(name, 7, 0).config(tmp_path)


def group_of_two(**fields):
    """Two completions of two tokens of one prompt; the first earned 1, the second 0."""
    return Rollouts(
        prompt_ids=torch.zeros(2, 1, dtype=torch.long),
        prompt_mask=torch.ones(2, 1, dtype=torch.bool),
        completion_ids=torch.zeros(2, 2, dtype=torch.long),
        completion_mask=torch.ones(2, 2, dtype=torch.bool),
        stopped=torch.ones(2, dtype=torch.bool),
        sampling_logprobs=torch.zeros(2, 2),
        group_ids=torch.zeros(2, dtype=torch.long),
        prompts=["", ""],
        completions=["a", "b"],
        rewards=torch.tensor([1.0, 0.0]),
        scored=torch.ones(2, dtype=torch.bool),
        old_logprobs=torch.full((2, 2), -1.0),
        **fields,
    )


def gradient(loss, logprobs):
    (term,) = loss.terms.values()
    return torch.autograd.grad(term.total, logprobs)[0].tolist()


def test_sequence_grpo_clips_the_ratio_of_the_whole_completion():
    """Each token moved by 0.1: its own ratio 1.105 is inside the clip range, that of the completion, 1.221, is not.

    With A = 1 the first completion's gradient is then cut off, and what is left is the penalty's,
    0.04 * (1 - exp(-0.2)) = 0.007251 a token. The second did not move: ratio 1, A = -1, gradient 1, penalty 0.
    """
    logprobs = torch.tensor([[-0.9, -0.9], [-1.0, -1.0]], requires_grad=True)
    trainer = SimpleNamespace(config=GRPOConfig(beta=0.04, kl_estimator="k3", kl_reference="old"))
    rollouts = SequenceGRPO.estimate(trainer, group_of_two())
    loss = SequenceGRPO.loss(trainer, PolicyOutputs(logprobs), rollouts)
    assert gradient(loss, logprobs) == [pytest.approx([0.007251] * 2, abs=1e-6), pytest.approx([1.0, 1.0])]


def test_sequence_grpo_leaves_no_kl_to_the_loop():
    """It is part of the loss, and would be counted twice."""
    assert SequenceGRPO.kl_loss_coef.fget(SimpleNamespace(config=GRPOConfig(beta=0.04))) == 0


def test_critic_free_ppo_clips_a_token_and_takes_the_batch_mean_off():
    logprobs = torch.tensor([[-0.9, -0.7], [-1.0, -1.0]], requires_grad=True)
    trainer = SimpleNamespace(aggregate=lambda per_token, _: SimpleNamespace(total=per_token.sum()))
    rollouts = CriticFreePPO.estimate(trainer, group_of_two())
    loss = CriticFreePPO.loss(trainer, PolicyOutputs(logprobs), rollouts)
    # -A * ratio: A = 0.5; the second token's ratio of 1.35 is beyond 1.2.
    assert gradient(loss, logprobs) == [pytest.approx([-0.5 * 1.105171, 0.0], abs=1e-6), pytest.approx([0.5, 0.5])]


def test_group_pg_weighs_by_the_scores_whatever_the_ratio():
    logprobs = torch.tensor([[-0.1, -9.0], [-1.0, -1.0]], requires_grad=True)
    trainer = SimpleNamespace(aggregate=lambda per_token, _: SimpleNamespace(total=per_token.sum()))
    loss = GroupPG.loss(trainer, PolicyOutputs(logprobs), GroupPG.estimate(trainer, group_of_two()))
    assert gradient(loss, logprobs) == [pytest.approx([-1.0, -1.0]), pytest.approx([1.0, 1.0])]


def test_without_anchor_the_target_forgets_the_old_weights():
    assert TPOWithoutAnchor.anchor_logits(SimpleNamespace(), group_of_two()).tolist() == [0.0, 0.0]


def test_ties_are_left_out_of_the_loss_where_that_is_asked_for():
    """The second group's rewards are equal: its rows take no part, whatever the epoch."""
    rollouts = group_of_two()
    tied = rollouts.select([0, 1, 0, 1]).replace(
        group_ids=torch.tensor([0, 0, 1, 1]), rewards=torch.tensor([1.0, 0.0, 1.0, 1.0])
    )
    trainer = object.__new__(TPOWithoutTies)
    trainer.config = TPOConfig(group_logits="logprob", use_target_policy=False, beta=0.0)
    estimated = trainer.estimate(tied)
    assert estimated.excluded.tolist() == [False, False, True, True]
    assert estimated.count("group") == 1


def test_every_algorithm_of_the_paper_is_there_and_loads():
    assert set(TABLE_3["prompts"]) == set(TABLE_3["interactions"]) <= set(ALGORITHMS)
    for name in ALGORITHMS:
        assert find_algorithm(name).load().config_class is not None


# ---- which runs ---------------------------------------------------------------------------------------------------


def test_table_3_is_every_algorithm_at_every_length_seed_by_seed():
    planned = plan(table_3("prompts"), seeds=2)
    assert len(planned) == 5 * 4 * 2
    assert [job.seed for job in planned] == [0] * 20 + [1] * 20
    few = plan(table_3("prompts"), algorithms=["tpo"], lengths=[5], seeds=1, episodes=300)
    assert few == [Job("tpo", 5, 0, episodes=300)]


def test_figures_vary_what_they_are_about():
    epochs = plan(FIGURES["epochs"], seeds=1)
    assert {job.num_epochs for job in epochs} == {1, 2, 4, 8, 16}
    assert {(job.prompts, job.group_size, job.length) for job in epochs} == {(256, 32, 8)}
    assert {job.group_size for job in plan(FIGURES["groups"], seeds=1)} == {4, 8, 16, 32, 64}


@pytest.mark.parametrize(("figure", "algorithm"), [("epochs", "dg"), ("groups", "ppo"), ("groups", "dg")])
def test_an_algorithm_that_a_figure_cannot_vary_is_refused(figure, algorithm):
    with pytest.raises(ConfigError, match=f"{algorithm} .*Leave it out"):
        plan(FIGURES[figure], algorithms=[algorithm], seeds=1)


def test_lengths_are_compared_in_tables_of_lengths_only():
    """They would be averaged as if they were seeds."""
    with pytest.raises(ConfigError, match="takes one number where epochs"):
        plan(FIGURES["epochs"], lengths=[7, 8], seeds=1)
    assert len(plan(FIGURES["anchor"], lengths=[7, 8], seeds=1)) == 8


def test_the_published_optimizer_leaves_no_room_for_another(tmp_path):
    with pytest.raises(ConfigError, match="optim has no effect with --optimizer published"):
        Job("tpo+optim=adamw", 7, 0, optimizer="published").config(tmp_path)
    assert Job("tpo+optim=adamw", 7, 0).config(tmp_path).optim == "adamw"


def test_the_papers_grpo_is_the_one_with_a_ratio_a_completion():
    assert reported(TABLE_3["prompts"], "grpo-sequence", 7) == reported(TABLE_3["prompts"], "grpo", 7) == 14.5
    assert reported(TABLE_3["prompts"], "tpo+eta=2", 7) is None


def test_runs_that_differ_have_folders_that_differ():
    changes = [{"algorithm": "grpo"}, {"length": 3}, {"seed": 1}, {"episodes": 5}, {"num_epochs": 2}, {"prompts": 3}]
    changes += [{"group_size": 2}, {"match": "interactions"}, {"reward_noise": 1e-7}, {"optimizer": "published"}]
    names = [SMALL.name, *(replace(SMALL, **change).name for change in changes)]
    assert len(set(names)) == len(names)


# ---- making them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALGORITHMS, "tpo+group_logits=tempered", "tpo+use_target_policy=true+beta=0.04"])
def test_every_algorithm_runs(name, tmp_path):
    result = run(replace(SMALL, algorithm=name, episodes=2), tmp_path)
    assert len(result.errors) == 2 and all(0 <= error <= 1 for error in result.errors)


def test_a_finished_run_is_not_made_again_and_its_result_is_read_back(tmp_path):
    made = run(SMALL, tmp_path)
    assert finished(SMALL, tmp_path).errors == pytest.approx(made.errors, abs=1e-5)
    assert finished(replace(SMALL, episodes=5), tmp_path) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"algorithm": "tpo"}'])
def test_a_result_that_cannot_be_read_is_made_again(damage, tmp_path):
    run(SMALL, tmp_path)
    (tmp_path / "runs" / SMALL.name / "result.json").write_text(damage)
    assert finished(SMALL, tmp_path) is None
    assert len(run(SMALL, tmp_path).errors) == SMALL.episodes


def test_metrics_that_lack_steps_are_no_result(tmp_path, monkeypatch):
    """Such as after another process had taken the file away."""
    monkeypatch.setattr(runs_module, "_train", lambda job, place: None)
    place = tmp_path / "runs" / SMALL.name
    place.mkdir(parents=True)
    rows = [{"step": step, "reward": 1.0, "time/step": 0.1} for step in (1, 2, 4)]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="has 3 steps where the run has 4"):
        run(SMALL, tmp_path)
    assert finished(SMALL, tmp_path) is None


def test_one_run_is_made_by_one_process_at_a_time(tmp_path):
    place = tmp_path / "runs" / SMALL.name
    place.mkdir(parents=True)
    with FileLock(place / "lock"), pytest.raises(ConfigError, match="another command"):
        run(SMALL, tmp_path)
    assert len(run(SMALL, tmp_path).errors) == SMALL.episodes


def test_the_error_is_counted_without_the_noise(tmp_path):
    """Rewards of 1 +- 100 would give errors far outside [0, 1]."""
    assert all(0 <= error <= 1 for error in run(replace(SMALL, reward_noise=100.0), tmp_path).errors)


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path):
    other = replace(SMALL, seed=1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / SMALL.name).write_text("a file where the run's folder should be")
    results, failed = run_jobs([SMALL, other], tmp_path, at_once=1)
    assert [result.job for result in results] == [other]
    assert len(failed) == 1 and failed[0].startswith(SMALL.name)


@pytest.mark.parametrize("optimizer", ["package", "published"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(optimizer, tmp_path, monkeypatch):
    job = replace(SMALL, episodes=6, optimizer=optimizer)
    whole = run(job, tmp_path / "whole")
    monkeypatch.setattr(jobs_module, "SAVE_STEPS", 2)
    calls = []

    def stopped_at_the_fourth_step(completions, answer):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return reward(completions, answer)

    reward = task.exact_reversal
    monkeypatch.setattr(task, "exact_reversal", stopped_at_the_fourth_step)
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "stopped")
    assert (tmp_path / "stopped" / "runs" / job.name / "checkpoints" / "step-000002").is_dir()
    monkeypatch.setattr(task, "exact_reversal", reward)
    assert run(job, tmp_path / "stopped").errors == whole.errors


@pytest.mark.slow
def test_the_command_makes_runs_side_by_side_and_writes_what_it_prints(tmp_path, capsys):
    words = (
        "reproduce tpo-paper --table 3 --lengths 2 --seeds 2 --episodes 3 --algorithms tpo,grpo --prompts 4 --jobs 2"
    )
    assert main([*words.split(), "--output_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    objects = json.loads((tmp_path / "results.json").read_text())
    assert [(item["algorithm"], item["length"], item["seed"]) for item in objects] == [
        ("tpo", 2, 0),
        ("grpo", 2, 0),
        ("tpo", 2, 1),
        ("grpo", 2, 1),
    ]
    assert all(len(item["errors"]) == 3 for item in objects)
    table = (tmp_path / "table.md").read_text().split("\n\n", 1)[1].strip()
    assert table in printed
    assert (tmp_path / "errors.png").stat().st_size > 10_000
    assert main([*words.split(), "--output_dir", str(tmp_path)]) == 0
    assert "4 of 4 runs are finished already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--table 3 --algorithms tppo", "got 'tppo'. Did you mean"),
        ("--table 3 --algorithms tpo,tpo", "once"),
        ("--figure epocs", "got 'epocs'. Did you mean 'epochs'"),
        ("--figure bandit --jobs 2", "takes --seeds and --output_dir only: got --jobs"),
        ("--table 3 --output_dir README.md", "must be a folder"),
        ("--figure bandit --output_dir README.md", "must be a folder"),
        ("--figure bandit --lengths 7", "takes --seeds and --output_dir only: got --lengths"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_runs(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("")
    assert main(["reproduce", "tpo-paper", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["--table 3 --seeds 0", "--table 3 --lengths 7,x", "--table 4", "", "--table 3 --figure epochs"]
)
def test_a_command_that_cannot_be_read_says_how_it_is_used(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "tpo-paper", *words.split()])
    assert stopped.value.code == 2
    assert "usage: quintain reproduce" in capsys.readouterr().err


# ---- numbers ------------------------------------------------------------------------------------------------------


def result(algorithm, length, seed, errors):
    return Result(Job(algorithm, length, seed), list(errors), {}, 1.0)


def test_the_final_error_is_that_of_the_last_twenty_steps():
    assert result("tpo", 7, 0, [1.0] * 30 + [0.2] * 10 + [0.0] * 10).final_error == pytest.approx(0.1)


def test_an_error_is_reached_when_the_mean_of_ten_steps_is_there():
    dips_once = result("tpo", 7, 0, [1.0] * 15 + [0.0] + [1.0] * 10 + [0.0] * 20)
    # Steps 27 to 31 are the first five of the twenty: with them, half of the last ten steps are 0.
    assert steps_to(dips_once, 0.5) == 31
    assert steps_to(dips_once, 0.0) == 36
    assert steps_to(result("tpo", 7, 0, [1.0] * 40), 0.5) is None


def test_a_relapse_is_the_worst_ten_steps_after_the_error_was_reached():
    relapses = result("tpo", 7, 0, [1.0] * 5 + [0.0] * 20 + [1.0] * 4 + [0.0] * 20)
    assert worst_after(relapses, 0.01) == pytest.approx(0.4)
    assert worst_after(result("tpo", 7, 0, [1.0] * 40), 0.01) is None


def test_the_error_around_a_step_looks_back_only():
    assert error_around(result("tpo", 7, 0, [1.0] * 5 + [0.0] * 20), 10) == pytest.approx(0.5)
    assert error_around(result("tpo", 7, 0, [1.0, 0.0]), 1) == 1.0


def test_the_table_gives_intervals_solved_seeds_and_the_papers_number():
    """Errors 0 and 100% in two seeds: mean 50%, half-width 12.706 * 0.7071 / sqrt(2), beyond both ends."""
    runs = [result("tpo", 7, 0, [1.0] * 20 + [0.0] * 40), result("tpo", 7, 1, [1.0] * 60)]
    runs += [result("dg", 9, 0, [1.0] * 60)]
    lines = tables(runs, AXES["length"], TABLE_3["prompts"]).splitlines()
    assert lines[2] == "| tpo | 7 | 2 | 50.0 [0.0, 100.0] | 0.0, 100.0 | 6.9 | 1/2 | 25 (1/2) | 30 (1/2) | 0.0, - |"
    assert lines[3] == "| dg | 9 | 1 | 100.0 | 100.0 | > 95 | 0/1 | - (0/1) | - (0/1) | - |"


def test_results_are_plain_json_that_holds_every_step(tmp_path):
    made = result("tpo", 7, 0, [0.123456, 0.5])
    text = write_results([made], tmp_path, axis=AXES["length"], paper={}, command="quintain reproduce")
    (item,) = json.loads((tmp_path / "results.json").read_text())
    assert (item["algorithm"], item["length"], item["seed"], item["errors"]) == ("tpo", 7, 0, [0.12346, 0.5])
    assert item["final_error"] == pytest.approx((0.123456 + 0.5) / 2, abs=1e-6)
    assert Path(tmp_path / "table.md").read_text() == f"    quintain reproduce\n\n{text}\n"
