"""Shared fixtures: a tiny model, a tiny dataset, and trainers small enough to run in a second."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # what its scripts share, as when they are run

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # on tensors this small, more threads only wait for each other

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples in every run; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

REVERSAL = [{"prompt": f"{a}{b}=", "answer": f"{b}{a}"} for a in "01" for b in "01"]


def fraction_right(completions, answer, **_):
    """Share of positions where the completion has the answer's character."""
    return [sum(x == y for x, y in zip(text, right)) / len(right) for text, right in zip(completions, answer)]


@pytest.fixture
def reversal():
    """Four prompts such as "01=", to be answered by the same characters in reverse."""
    return [dict(row) for row in REVERSAL]


@pytest.fixture
def tiny_settings(tmp_path):
    """Config arguments of a run of a few steps on `scratch:tiny`."""
    return {
        "output_dir": str(tmp_path / "run"),
        "model_init_kwargs": {"characters": "01="},
        "max_completion_length": 2,
        "min_completion_length": 2,
        "prompts_per_step": 2,
        "num_generations": 4,
        "learning_rate": 1e-3,
        "max_steps": 2,
        "save_steps": None,
    }


@pytest.fixture
def make_trainer(tiny_settings, reversal):
    """Builds a trainer of the given class on the reversal prompts; keyword arguments go to its config."""

    def make(trainer_class, *, model="scratch:tiny", reward_funcs=fraction_right, trainer=None, **settings):
        settings = {**tiny_settings, **settings}
        if not isinstance(model, str):
            settings["model_init_kwargs"] = None
        return trainer_class(
            model=model,
            reward_funcs=reward_funcs,
            args=trainer_class.config_class(**settings),
            train_dataset=reversal,
            **(trainer or {}),
        )

    return make
