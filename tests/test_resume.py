"""A resumed run equals an unbroken one, bit for bit (T09): every slot, optimizer, metrics and sampled tokens."""

from __future__ import annotations

import json

import pytest
import torch

from quintain import CheckpointError, DGTrainer, GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer, TPOTrainer

ALL = [PPOTrainer, GRPOTrainer, RLOOTrainer, ReinforceTrainer, DGTrainer, TPOTrainer]
TIMES = ("time/", "tokens_per_second", "memory")

SETTINGS = {
    "max_steps": 6,
    "prompts_per_step": 2,
    "num_generations": 2,
    "num_epochs": 2,
    "warmup_steps": 2,
    "lr_scheduler_type": "linear",
    "use_target_policy": True,
    "beta": 0.05,
    "ema_decay": 0.9,
    "kl_control": "adaptive",
    "target_kl": 0.01,
    "kl_horizon": 50,
    "save_steps": 1,
    "seed": 5,
}


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


def completions(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("trainer_class", ALL)
def test_a_run_stopped_in_the_middle_and_resumed_equals_an_unbroken_one(trainer_class, make_trainer, tmp_path):
    straight = make_trainer(trainer_class, **SETTINGS, output_dir=str(tmp_path / "straight"))
    straight.train()

    broken = make_trainer(trainer_class, **SETTINGS, output_dir=str(tmp_path / "broken"))
    broken.max_steps = 3
    broken.train()
    resumed = make_trainer(trainer_class, **SETTINGS, output_dir=str(tmp_path / "broken"))
    resumed.train(resume_from=tmp_path / "broken")

    whole, again = straight.policies.state_dict(), resumed.policies.state_dict()
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for name, part in straight.run.parts.items():
        if name == "doctor":  # its history holds seconds
            continue
        assert str(part.state_dict()) == str(resumed.run.parts[name].state_dict()), name
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "broken")
    assert completions(tmp_path / "straight") == completions(tmp_path / "broken")


def test_every_prompt_is_used_equally_often_across_an_interruption(make_trainer, tmp_path):
    """4 prompts, 2 a step, 6 steps: 3 passes."""
    trainer = make_trainer(GRPOTrainer, **SETTINGS)
    trainer.max_steps = 3
    trainer.train()
    resumed = make_trainer(GRPOTrainer, **SETTINGS)
    resumed.train(resume_from=tmp_path / "run")
    used = [row["prompt"] for row in completions(tmp_path / "run")]
    assert {prompt: used.count(prompt) for prompt in set(used)} == dict.fromkeys(["00=", "01=", "10=", "11="], 3 * 2)


@pytest.mark.parametrize("part", ["policies", "optimizer", "generators", "prompts", "kl_controller"])
def test_a_checkpoint_without_a_part_is_refused_by_name(part, make_trainer, tmp_path):
    make_trainer(GRPOTrainer, **SETTINGS).train()
    newest = tmp_path / "run" / "checkpoints" / "step-000006"
    (newest / f"{part}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=part):
        make_trainer(GRPOTrainer, **SETTINGS).train(resume_from=newest)


def test_the_state_of_another_optimizer_is_refused(make_trainer, tmp_path):
    """torch takes it without a word, and fails or goes astray at the next step."""
    make_trainer(GRPOTrainer, **SETTINGS).train()
    with pytest.raises(CheckpointError, match=r"'optimizer'.*state of AdamW, this run has Lion"):
        make_trainer(GRPOTrainer, **SETTINGS, optim="lion").train(resume_from=tmp_path / "run")


def test_a_flipped_bit_is_found_before_anything_is_restored(make_trainer, tmp_path):
    make_trainer(GRPOTrainer, **SETTINGS).train()
    file = tmp_path / "run" / "checkpoints" / "step-000006" / "policies.safetensors"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(bytes(content))
    trainer = make_trainer(GRPOTrainer, **SETTINGS)
    before = {name: value.clone() for name, value in trainer.policies.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"policies\.safetensors is damaged"):
        trainer.train(resume_from=tmp_path / "run")
    assert all(torch.equal(before[name], value) for name, value in trainer.policies.state_dict().items())


def test_old_checkpoints_go_only_beyond_the_limit_and_the_best_one_stays(make_trainer, tmp_path):
    trainer = make_trainer(GRPOTrainer, **{**SETTINGS, "save_total_limit": 2, "metric_for_best_model": "reward"})
    trainer.train()
    best = max(trainer.run.state.log_history, key=lambda row: row["reward"])["step"]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step-000005", "step-000006", f"step-{best:06d}"}


def test_the_same_seed_gives_the_same_numbers_and_another_seed_does_not(make_trainer, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_trainer(TPOTrainer, **{**SETTINGS, "seed": seed, "output_dir": str(tmp_path / name)}).train()
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")
