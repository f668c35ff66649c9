"""`micro_batch_tokens: auto`: what a token takes is measured, and the peak stays below the limit that was asked for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from quintain import ConfigError, GRPOConfig, GRPOTrainer, PPOTrainer, TPOTrainer
from quintain.cli.main import main
from quintain.policies.memory import (
    GIB,
    RESERVE,
    ActivationCost,
    Lengths,
    activation_cost,
    available_memory,
    container_memory,
    kept_for_backward,
    token_budget,
)

LENGTHS = Lengths(prompt=30, completion=70, group=4, shared=True, together=False, prompts=5)
PLAIN = ActivationCost(fixed=0, token=100, pair=0)

# ---- what a token takes --------------------------------------------------------------------------------------------


def test_what_a_forward_pass_keeps_is_counted_once_and_without_weights():
    """x (6 numbers) is kept by the product with w and by the square; the square root keeps its result (6)."""
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    kept = kept_for_backward(lambda: (x[:1] * w + x**2).sqrt(), exist={w.untyped_storage().data_ptr()})
    assert sorted(kept) == [6 * 4, 6 * 4]


class Layers(torch.nn.Module):
    """Keeps, for t tokens: a tensor of the weights' size, 5 t numbers, and t * t numbers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1000))

    def forward(self, rollouts):
        # Distinct tokens, as prompts are shared: of the prompt, and of both completions.
        tokens = rollouts.prompt_ids.shape[1] + rollouts.completion_ids.numel()
        copy = self.weight * 1.0
        fixed = copy.sin()  # keeps `copy`
        rows = (self.weight[:5].expand(tokens, 5) * 1.0).sin()
        pairs = (self.weight[:1].expand(tokens, tokens) * 1.0).sin()
        return fixed.sum() + rows.sum() + pairs.sum()


def test_cost_separates_what_grows_with_tokens_with_pairs_and_not_at_all(monkeypatch):
    monkeypatch.setattr("quintain.policies.memory.SAFETY", 1.0)
    module = Layers()
    cost = activation_cost(module, module, layers=10**9, checkpointing=False)
    # The largest tensor, here that of the pairs, counts three times: its gradients come beside it.
    assert cost.pair == pytest.approx(3 * 4, rel=1e-6)
    assert cost.token == pytest.approx(5 * 4, rel=1e-6)
    assert cost.fixed == pytest.approx(1000 * 4, rel=1e-6)
    shallow = activation_cost(module, module, layers=1, checkpointing=False)  # one layer, and so five times the whole
    assert shallow.token == pytest.approx((1 + 5) * 5 * 4, rel=1e-6)
    assert cost.of(10, 3) == pytest.approx(4000 + 10 * (20 + 12 * 3), rel=1e-6)


def test_a_deeper_model_takes_more_by_its_layers_and_checkpointing_less(make_trainer):
    """Beside its own layers, each counts five for what is in the works."""

    def cost(**settings):
        layers = {"num_hidden_layers": settings.pop("layers", 8), "hidden_size": 64, "characters": "01="}
        trainer = make_trainer(GRPOTrainer, model_init_kwargs=layers, **settings)
        modes = [part.training for part in trainer.policies.module.modules()]
        found = activation_cost(
            trainer.policies.online,
            trainer.policies.module,
            layers=layers["num_hidden_layers"],
            checkpointing=trainer.config.gradient_checkpointing,
        )
        assert modes == [part.training for part in trainer.policies.module.modules()]
        return found.of(1000, 100)

    assert 1.5 < cost(layers=16) / cost(layers=8) < (16 + 5) / (8 + 5)
    assert 5 / (16 + 5) < cost(layers=16, gradient_checkpointing=True) / cost(layers=16) < 0.5


def test_measuring_leaves_no_gradient_and_no_weight_changed(make_trainer):
    plain, sized = make_trainer(GRPOTrainer), make_trainer(GRPOTrainer, micro_batch_tokens="auto")
    assert all(value.grad is None for value in sized.model.parameters())
    for ours, theirs in zip(sized.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---- the number ----------------------------------------------------------------------------------------------------


def budget(room, cost=PLAIN, lengths=LENGTHS, used=7 * GIB, to_come=GIB):
    return token_budget(
        cost, lengths, limit=used + to_come + RESERVE + room, used=used, to_come=to_come, setting="memory_limit_gb=9"
    )


def test_the_budget_is_what_the_room_holds():
    assert budget(100 * 777) == 777
    assert budget(100 * 777 + 5000, ActivationCost(fixed=5000, token=100, pair=0)) == 777


def test_pairs_are_counted_for_the_longest_row_that_can_be():
    """30 tokens of prompt and 4 completions of 70 behind it: 310 wide if shared, else 100."""
    cost = ActivationCost(fixed=0, token=100, pair=1)
    apart = Lengths(**{**vars(LENGTHS), "shared": False})
    assert budget(410 * 500, cost) == 500
    assert budget(200 * 500, cost, apart) == 500


def test_the_budget_ends_at_a_whole_step_and_starts_at_one_sequence():
    assert budget(10 * GIB) == 5 * (30 + 4 * 70)
    assert budget(10 * GIB, lengths=Lengths(**{**vars(LENGTHS), "shared": False})) == 5 * 4 * 100
    assert budget(100 * 100) == 100


@pytest.mark.parametrize(
    ("lengths", "least"),
    [
        (LENGTHS, 100),
        (Lengths(**{**vars(LENGTHS), "together": True}), 30 + 4 * 70),
        (Lengths(**{**vars(LENGTHS), "together": True, "shared": False}), 4 * 100),
    ],
)
def test_a_limit_without_room_for_the_smallest_micro_batch_is_refused_with_numbers_that_work(lengths, least):
    cost = ActivationCost(fixed=0, token=float(GIB) / 100, pair=0)
    assert budget(cost.of(least, 1) + 1000, cost, lengths) >= 100  # 1000 bytes for rounding
    with pytest.raises(ConfigError) as caught:
        budget(cost.of(least, 1) - 1000, cost, lengths)
    text = str(caught.value)
    for part in ("100 tokens (30 of prompt, 70 of completion)", "7.00 are in use", "LoRA", "gradient_checkpointing"):
        assert part in text
    assert ("group of 4" in text) == lengths.together
    advised = float(re.search(r"memory_limit_gb=([\d.]+)\.$", text)[1])
    assert budget(advised * GIB - 8 * GIB - RESERVE, cost, lengths) >= 100
    assert advised * GIB - 8 * GIB - RESERVE < 1.2 * cost.of(least, 1)


# ---- what memory there is ------------------------------------------------------------------------------------------


def test_available_memory_is_read_where_the_system_says_it(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  99 kB\nMemFree:  5 kB\nMemAvailable:    2048 kB\n")
    assert available_memory(tmp_path / "meminfo") == 2 * 2**20
    assert available_memory(tmp_path / "nothing") is None


def test_the_lowest_limit_of_the_control_groups_around_the_process_counts(tmp_path):
    outer, inner = tmp_path / "cgroup/outer", tmp_path / "cgroup/outer/inner"
    inner.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/outer/inner\n")
    for folder, limit, usage, files in ((outer, "1000", "700", "50"), (inner, "max", "600", "10")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(usage + "\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")
    assert container_memory(tmp_path / "self", tmp_path / "cgroup") == 1000 - 700 + 50
    (inner / "memory.max").write_text("620\n")
    assert container_memory(tmp_path / "self", tmp_path / "cgroup") == 620 - 600 + 10


def test_the_first_version_of_control_groups_is_read_too(tmp_path):
    folder = tmp_path / "cgroup/memory/job"
    folder.mkdir(parents=True)
    (tmp_path / "self").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    (folder / "memory.usage_in_bytes").write_text("400\n")
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert container_memory(tmp_path / "self", tmp_path / "cgroup") is None
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    assert container_memory(tmp_path / "self", tmp_path / "cgroup") == 600
    assert container_memory(tmp_path / "nothing", tmp_path / "cgroup") is None


# ---- runs ----------------------------------------------------------------------------------------------------------

MEASURE = """
import json, sys
from pathlib import Path
import torch
from quintain import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)
settings = json.loads(sys.argv[1])
trainer = GRPOTrainer(
    "scratch:tiny",
    lambda completions, **_: [float(len(text)) for text in completions],
    GRPOConfig(
        output_dir=sys.argv[2], max_steps=1, save_steps=None, prompts_per_step=8, num_generations=8,
        max_completion_length=120, min_completion_length=120,
        model_init_kwargs={"hidden_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 128}, **settings,
    ),
    [{"prompt": f"{number:03d}"} for number in range(8)],
)
trainer.train()
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({"peak": peak, "tokens": trainer.policies.micro_batch_tokens}))
"""


def measure(tmp_path, name, **settings):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(settings), str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_the_peak_stays_below_the_limit_and_a_wider_limit_holds_more_tokens_at_once(tmp_path):
    """A step of 8 x 8 sequences: all of it at once takes more than the lower limit."""
    whole = measure(tmp_path, "whole", micro_batch_tokens=10**6)
    limit = 0.7 * whole["peak"]
    narrow = measure(tmp_path, "narrow", micro_batch_tokens="auto", memory_limit_gb=limit / GIB)
    wide = measure(tmp_path, "wide", micro_batch_tokens="auto", memory_limit_gb=2 * limit / GIB)
    assert narrow["peak"] < limit
    assert wide["peak"] < 2 * limit
    assert 123 <= narrow["tokens"] < wide["tokens"] <= 8 * (3 + 8 * 120)


def test_the_number_that_was_chosen_stands_in_config_yaml_and_is_said_once(make_trainer, tmp_path, caplog):
    trainer = make_trainer(GRPOTrainer, micro_batch_tokens="auto")
    trainer.train()
    number = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["micro_batch_tokens"]
    assert number == trainer.policies.micro_batch_tokens == 2 * (3 + 4 * 2)  # a whole step, with ample memory
    assert sum(f"micro_batch_tokens='auto' is {number}" in record.message for record in caplog.records) == 1
    assert trainer.config.micro_batch_tokens == "auto"  # another trainer of this config chooses for itself


def test_a_critic_with_a_backbone_of_its_own_is_counted_in(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("quintain.trainers.assembly.token_budget", lambda *_, **__: 20)
    trainer = make_trainer(PPOTrainer, micro_batch_tokens="auto", value_model="separate")
    trainer.train()
    assert trainer.policies.micro_batch_tokens == 20
    number = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["micro_batch_tokens"]
    again = make_trainer(PPOTrainer, micro_batch_tokens=number, value_model="separate")
    assert again.policies.micro_batch_tokens == 20


def test_a_resumed_run_keeps_the_number_of_the_first_one_whatever_memory_says_now(make_trainer, tmp_path, monkeypatch):
    settings = {"micro_batch_tokens": "auto", "max_steps": 4, "save_steps": 1}
    chosen = {"now": 15}
    monkeypatch.setattr("quintain.trainers.assembly.token_budget", lambda *_, **__: chosen["now"])
    straight = make_trainer(GRPOTrainer, **settings, output_dir=str(tmp_path / "straight"))
    straight.train()
    broken = make_trainer(GRPOTrainer, **settings, output_dir=str(tmp_path / "broken"))
    broken.max_steps = 2
    broken.train()
    chosen["now"] = 40
    resumed = make_trainer(GRPOTrainer, **settings, output_dir=str(tmp_path / "broken"))
    resumed.train(resume_from=tmp_path / "broken")
    assert resumed.policies.micro_batch_tokens == 15
    assert yaml.safe_load((tmp_path / "broken" / "config.yaml").read_text())["micro_batch_tokens"] == 15
    whole, again = straight.policies.state_dict(), resumed.policies.state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_run_with_a_number_of_its_own_is_resumed_with_that_number(make_trainer, tmp_path):
    settings = {"max_steps": 2, "save_steps": 1}
    make_trainer(GRPOTrainer, **settings, micro_batch_tokens=11).train()
    resumed = make_trainer(GRPOTrainer, **{**settings, "max_steps": 3}, micro_batch_tokens=22)
    resumed.train(resume_from=tmp_path / "run")
    assert resumed.policies.micro_batch_tokens == 22


def test_the_command_repeats_the_number_when_it_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quintain.trainers.assembly.token_budget", lambda *_, **__: 96)
    arguments = ["--output_dir", "runs/a", "--max_steps", "1", "--prompts_per_step", "2", "--save_steps", "1"]
    assert main(["train", "tiny", *arguments, "--micro_batch_tokens", "auto", "--memory_limit_gb", "64"]) == 0
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["micro_batch_tokens"] == 96
    monkeypatch.setattr("quintain.trainers.assembly.token_budget", lambda *_, **__: 7)
    assert main(["train", "--resume", "runs/a", "--max_steps", "2"]) == 0
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["micro_batch_tokens"] == 96


def test_a_limit_below_what_the_process_takes_already_is_refused(make_trainer):
    with pytest.raises(ConfigError, match=r"no room for one sequence of up to 5 tokens.*memory_limit_gb=0.01"):
        make_trainer(GRPOTrainer, micro_batch_tokens="auto", memory_limit_gb=0.01)
    with pytest.raises(ConfigError, match=r"no room for one group of 4 sequences"):
        make_trainer(TPOTrainer, micro_batch_tokens="auto", memory_limit_gb=0.01)


def test_prompts_of_unknown_length_are_refused_before_the_model_loads():
    config = GRPOConfig(micro_batch_tokens="auto", max_steps=1)
    with pytest.raises(ConfigError, match=r"'auto' must know how long prompts can be.*Set max_prompt_length"):
        GRPOTrainer("scratch:tiny", args=config)


def test_a_run_without_data_goes_by_max_prompt_length(tmp_path):
    settings = {"max_steps": 1, "max_completion_length": 5, "prompts_per_step": 2, "num_generations": 3}
    config = GRPOConfig(micro_batch_tokens="auto", max_prompt_length=10, output_dir=str(tmp_path), **settings)
    assert GRPOTrainer("scratch:tiny", args=config).policies.micro_batch_tokens == 2 * (10 + 3 * 5)


@pytest.mark.parametrize("value", ["all", "", 0, 2.5, True])
def test_a_word_that_means_nothing_is_refused(value):
    with pytest.raises(ConfigError, match=r"micro_batch_tokens must be a whole number in \[1, inf\) or 'auto'"):
        GRPOConfig(micro_batch_tokens=value)


def test_a_limit_that_nothing_reads_is_noted():
    assert any("memory_limit_gb=8 has no effect" in note for note in GRPOConfig(memory_limit_gb=8).notes)
    assert not GRPOConfig(memory_limit_gb=8, micro_batch_tokens="auto").notes
    with pytest.raises(ConfigError, match="memory_limit_gb must be a number in"):
        GRPOConfig(memory_limit_gb=0)
