"""The promise that names the project: one loop, and an algorithm is a small file that touches no line of it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quintain
from quintain import OnlineRLTrainer
from quintain.trainers import base

NAMED = ["PPOTrainer", "GRPOTrainer", "RLOOTrainer", "ReinforceTrainer", "DGTrainer", "TPOTrainer"]
ROOT = Path(__file__).resolve().parents[1]


def test_the_loop_names_no_algorithm():
    source = re.sub(r'""".*?"""', "", inspect.getsource(base), flags=re.S)
    assert not re.findall(r"\b(ppo|grpo|rloo|reinforce|dg|tpo)\b", source, flags=re.I)


def test_a_step_fits_on_one_screen():
    lines = sum(
        len(inspect.getsource(getattr(OnlineRLTrainer, name)).splitlines())
        for name in ("run_step", "fit", "train_minibatch")
    )
    assert lines <= 60


@pytest.mark.parametrize("name", NAMED)
def test_a_named_trainer_is_a_small_file_that_inherits_the_base_alone_and_owns_no_loop(name):
    trainer = getattr(quintain, name)
    assert trainer.__bases__ == (OnlineRLTrainer,)
    assert not {"train", "run_step", "fit", "train_minibatch"} & set(vars(trainer))
    assert len(inspect.getsource(inspect.getmodule(trainer)).splitlines()) <= 240


@pytest.mark.parametrize("missing", ["estimate", "loss"])
def test_an_algorithm_without_its_two_methods_is_refused_before_a_model_is_looked_for(missing):
    methods = {"estimate": lambda self, rollouts: rollouts, "loss": lambda self, outputs, rollouts: None}
    del methods[missing]
    trainer = type("Half", (OnlineRLTrainer,), methods)
    with pytest.raises(quintain.ConfigError, match=f"Half must define {missing}"):
        trainer("no/such-model", lambda completions, **_: [0.0])


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("estimate", None, "estimate must return Rollouts"),
        ("loss", 0.0, "loss must return a LossOutput"),
        ("loss", quintain.LossOutput({"policy": 0.0}), "'policy' of .*loss must be a LossTerm"),
    ],
)
def test_a_method_that_returns_the_wrong_thing_is_told_what_to_return(method, returned, message, make_trainer):
    trainer = make_trainer(quintain.GRPOTrainer)
    setattr(trainer, method, lambda *_: returned)
    with pytest.raises(TypeError, match=message):
        trainer.run_step()


def test_the_old_name_of_the_base_class_is_an_alias():
    assert quintain.OnlineRLTrainerBase is OnlineRLTrainer


def test_every_public_name_can_be_imported():
    for name in quintain.__all__:
        assert getattr(quintain, name) is not None


def test_configs_and_help_do_not_import_torch():
    program = "import sys, quintain, quintain.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
