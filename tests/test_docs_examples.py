"""The examples in the docs run as printed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quintain import PPOTrainer, TPOTrainer

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.S)


@pytest.mark.slow
def test_the_guides_algorithm_trains_by_dotted_path_and_passes_its_own_test(tmp_path):
    example, test = blocks(GUIDE)[0], blocks(GUIDE)[-1]
    assert example.startswith('"""Best-of-group')
    (tmp_path / "best_of_group.py").write_text(example)
    (tmp_path / "test_best_of_group.py").write_text(test)
    command = re.search(r"^quintain (train tiny --algorithm .*)$", GUIDE, flags=re.M).group(1).split()
    program = [sys.executable, "-m", "quintain.cli.main", *command, "--max_steps", "3"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert "chosen_fraction" in rows[0]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path, check=False)
    assert done.returncode == 0


def test_the_page_about_ppo_runs_as_printed(tmp_path, monkeypatch, capsys):
    """S37, S53, S54: the stages overridden, then a loop of one's own, on the same trainer."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks((ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")):
        exec(block, names)
    assert "value loss" in capsys.readouterr().out
    assert (tmp_path / "runs" / "own-reward" / "value_model" / "config.json").exists()
    ratio, advantages = torch.tensor([1.5, 1.0]), torch.tensor([1.0, -1.0])
    stub = SimpleNamespace(cliprange=0.2, kl_coef=0.1)
    expected = (-1.2 + 1.0) / 2 + 0.1 * (0.5 - math.log(1.5)) / 2
    assert float(names["OwnConstraint"].actor_loss(stub, ratio, advantages)) == pytest.approx(expected, abs=1e-6)


def test_the_guides_example_is_short():
    assert len([line for line in blocks(GUIDE)[0].splitlines() if line.strip()]) <= 45


def test_the_readme_example_is_under_fifteen_lines():
    example = blocks((ROOT / "README.md").read_text(encoding="utf-8"))[0]
    assert len(example.strip().splitlines()) <= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_run", "ppo_custom_reward", "ppo_custom_constraint", "ppo_manual_loop"])
def test_an_example_runs_and_prints_a_rising_reward(name, tmp_path):
    program = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rewards = [float(number) for number in re.findall(r"mean reward ([-0-9.]+)", done.stdout)]
    assert rewards[-1] > rewards[0] + 0.1


@pytest.mark.parametrize("trainer_class", [PPOTrainer, TPOTrainer])
def test_every_number_of_a_step_is_explained(trainer_class, make_trainer, reversal):
    trainer = make_trainer(trainer_class, max_steps=1, eval_steps=1, trainer={"eval_dataset": reversal})
    trainer.train()
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    explained = " ".join(re.findall(r"`([^`]+)`", page))
    for name in trainer.run.state.log_history[0]:
        general = re.sub(r"^(eval_)?rewards/[^/]+/", r"\1rewards/{name}/", re.sub(r"^loss/.*", "loss/{term}", name))
        assert general in explained or general.removeprefix("completions/") in explained, name
