"""`--profile`: one step is traced by phase, and the run comes out as it would have without."""

from __future__ import annotations

import json
import time

import pytest
import torch

from quintain import GRPOTrainer, PPOTrainer, RewardError, TPOTrainer
from quintain.cli.main import main
from quintain.trainers.profiling import profile_step

PHASES = ["rollout", "reward", "annotate", "estimate", "forward", "backward", "optimizer", "rest"]


def phases(folder):
    return json.loads((folder / "profile" / "phases.json").read_text())


def profiled(make_trainer, trainer_class=GRPOTrainer, **settings):
    trainer = make_trainer(trainer_class, **settings)
    profile_step(trainer)
    trainer.train(settings.get("resume_from"))
    return trainer


def test_the_phases_add_up_to_the_second_step(make_trainer, tmp_path):
    trainer = profiled(make_trainer, max_steps=3, num_epochs=2)
    report = phases(tmp_path / "run")
    assert list(report["phases"]) == PHASES
    assert report["step"] == 2
    assert sum(phase["seconds"] for phase in report["phases"].values()) == pytest.approx(report["seconds"])
    assert sum(phase["share"] for phase in report["phases"].values()) == pytest.approx(1.0)
    assert all(phase["seconds"] > 0 for phase in report["phases"].values())
    assert report["tokens"] == 2 * 4 * 2  # prompts, completions, tokens of each
    steps = [row["time/step"] for row in trainer.run.state.log_history]
    assert report["seconds"] <= steps[1]
    assert report["memory_peak_gb"] > 0


def test_time_spent_in_a_phase_is_found_there(make_trainer, tmp_path):
    """A reward that sleeps, a loss that sleeps twice (once an epoch), and an update of the target that sleeps."""

    class Slow(GRPOTrainer):
        def loss(self, outputs, rollouts):
            time.sleep(0.15)
            return super().loss(outputs, rollouts)

        def maybe_update_target(self):
            time.sleep(0.1)

    def slow_reward(completions, **_):
        time.sleep(0.4)
        return [0.0, 1.0] * (len(completions) // 2)

    profiled(make_trainer, Slow, reward_funcs=slow_reward, num_epochs=2)
    found = {name: phase["seconds"] for name, phase in phases(tmp_path / "run")["phases"].items()}
    assert 0.4 <= found["reward"] < 0.6
    assert 0.3 <= found["forward"] < 0.5
    assert 0.2 <= found["optimizer"] < 0.4
    assert found["rest"] < 0.2


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, PPOTrainer, TPOTrainer])
def test_a_profiled_run_is_bit_for_bit_the_run_without(trainer_class, make_trainer, tmp_path):
    settings = {"max_steps": 3, "num_epochs": 2, "num_mini_batches": 2}
    plain = make_trainer(trainer_class, **settings, output_dir=str(tmp_path / "plain"))
    plain.train()
    traced = profiled(make_trainer, trainer_class, **settings, output_dir=str(tmp_path / "traced"))
    assert (tmp_path / "traced" / "profile" / "phases.json").exists()
    ours, theirs = traced.policies.state_dict(), plain.policies.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for ours, theirs in zip(traced.run.state.log_history, plain.run.state.log_history, strict=True):
        assert ours.keys() == theirs.keys()
        assert {name: ours[name] for name in ours if name.startswith(("loss", "kl", "reward", "grad_norm"))} == {
            name: theirs[name] for name in theirs if name.startswith(("loss", "kl", "reward", "grad_norm"))
        }


def test_the_trace_holds_the_phases_and_operators_txt_the_costliest_operators(make_trainer, tmp_path):
    profiled(make_trainer)
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert set(PHASES) - {"rest"} <= names
    assert "aten::mm" in names or "aten::addmm" in names
    table = (tmp_path / "run" / "profile" / "operators.txt").read_text()
    assert "aten::" in table and "Self CPU" in table


def test_a_run_of_one_step_is_traced_in_that_step(make_trainer, tmp_path):
    profiled(make_trainer, max_steps=1)
    assert phases(tmp_path / "run")["step"] == 1


def test_a_resumed_run_is_traced_in_its_own_second_step(make_trainer, tmp_path):
    first = make_trainer(GRPOTrainer, max_steps=5, save_steps=1)
    first.max_steps = 2
    first.train()
    resumed = make_trainer(GRPOTrainer, max_steps=5, save_steps=1)
    profile_step(resumed)
    resumed.train(resume_from=tmp_path / "run")
    assert phases(tmp_path / "run")["step"] == 4
    finished = make_trainer(GRPOTrainer, max_steps=5, save_steps=1)
    profile_step(finished)
    finished.train(resume_from=tmp_path / "run")
    assert phases(tmp_path / "run")["step"] == 4  # no step was left to trace


def test_nothing_of_the_profile_stays_in_the_trainer(make_trainer):
    trainer = make_trainer(GRPOTrainer)
    parts = (trainer, trainer.policies, trainer.optimizer, trainer.accelerator)
    before = [set(vars(part)) for part in parts]
    profile_step(trainer)
    trainer.train()
    assert [set(vars(part)) for part in parts] == before


def test_a_method_put_on_the_instance_is_still_there_afterwards(make_trainer):
    trainer = make_trainer(GRPOTrainer)
    calls = []
    loss = trainer.loss
    trainer.loss = lambda *arguments: calls.append(1) or loss(*arguments)
    mine = trainer.loss
    profile_step(trainer)
    trainer.train()
    assert trainer.loss is mine and len(calls) == 2


def test_a_step_that_fails_fails_as_it_would_without_and_leaves_nothing_behind(make_trainer, tmp_path):
    def fails(completions, **_):
        raise ValueError("out of quota")

    trainer = make_trainer(GRPOTrainer, reward_funcs=fails, max_steps=1)
    profile_step(trainer)
    with pytest.raises(RewardError, match="out of quota"):
        trainer.train()
    assert "score" not in vars(trainer) and "run_step" not in vars(trainer)
    assert not (tmp_path / "run" / "profile").exists()


def test_the_command_profiles_and_says_where_the_files_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--output_dir", "runs/a", "--max_steps", "2", "--save_steps", "2", "--prompts_per_step", "2"]
    assert main(["train", "tiny", *arguments, "--profile"]) == 0
    text = capsys.readouterr().err
    assert "Profile of step 2" in text and "runs/a/profile" in text
    assert all(name in text for name in PHASES)
    assert phases(tmp_path / "runs/a")["step"] == 2
    assert main(["train", "--resume", "runs/a", "--max_steps", "3", "--profile"]) == 0
    assert phases(tmp_path / "runs/a")["step"] == 3
    assert main(["train", "tiny", *arguments, "--overwrite"]) == 0
    assert not (tmp_path / "runs/a/profile").exists()
