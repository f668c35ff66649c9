"""From a recipe's `rewards:` to functions and weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from reward_rollouts import make_rollouts

from quintain.errors import ConfigError
from quintain.rewards import RewardPipeline, resolve_rewards

MODULE = """
def short(completions, limit=3, **kwargs):
    return [float(len(text) <= limit) for text in completions]

class Grader:
    def __init__(self, value=1.0):
        self.value = value
    def __call__(self, completions):
        return [self.value] * len(completions)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current directory, which is not on the import path."""
    name = f"own_rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return name


def names(spec: Any) -> list[str]:
    return RewardPipeline(resolve_rewards(spec)[0]).names


def test_a_name_a_mapping_and_a_list_all_resolve() -> None:
    functions, weights = resolve_rewards(
        ["sentiment", {"name": "regex", "weight": 0.5, "kwargs": {"pattern": "a"}}, {"name": "repetition"}]
    )
    assert RewardPipeline(functions).names == ["sentiment", "regex", "repetition"]
    assert weights == [1.0, 0.5, 1.0]
    assert names("sentiment") == names({"name": "sentiment"}) == ["sentiment"]


@pytest.mark.parametrize("separator", [":", "."])
def test_a_dotted_path_names_a_function_in_the_current_directory(own_module: str, separator: str) -> None:
    functions, _ = resolve_rewards({"name": f"{own_module}{separator}short", "kwargs": {"limit": 1}})
    pipeline = RewardPipeline(functions, columns=[])
    assert pipeline.names == ["short"]
    assert pipeline.score(make_rollouts(["a", "ab"])).rewards.tolist() == [1.0, 0.0]


def test_a_class_at_a_dotted_path_is_made_with_the_settings(own_module: str) -> None:
    functions, _ = resolve_rewards({"name": f"{own_module}:Grader", "kwargs": {"value": 2.0}})
    assert RewardPipeline(functions).score(make_rollouts(["a"])).rewards.tolist() == [2.0]


def test_callables_pass_through_with_settings_bound() -> None:
    def judge(completions: list[str], scale: float = 1.0) -> list[float]:
        return [scale] * len(completions)

    functions, weights = resolve_rewards([judge, {"name": judge, "kwargs": {"scale": 3.0}, "weight": 2}])
    assert functions[0] is judge and isinstance(functions[1], functools.partial)
    assert weights == [1.0, 2.0]


def test_the_pipeline_takes_names_too() -> None:
    assert RewardPipeline(["sentiment", "repetition"]).names == ["sentiment", "repetition"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sentimant", "unknown reward 'sentimant'. Did you mean 'sentiment'.*Built in: exact_match, "),
        (
            {"name": "length", "kwargs": {"maximum": 3}},
            "'length' has no setting 'maximum'.*Its settings: target, min, max",
        ),
        ({"name": "sentiment", "kwargs": {"distnct": True}}, "Did you mean 'distinct'"),
        ("regex", "'regex' needs the setting 'pattern'"),
        ({"name": "sentiment", "wieght": 2}, "takes name, weight, kwargs: got 'wieght'. Did you mean 'weight'"),
        ({"weight": 2}, "a reward needs a name"),
        ({"name": "sentiment", "weight": "heavy"}, "weight of reward 'sentiment' must be a finite number: got 'heavy'"),
        ({"name": "sentiment", "weight": float("inf")}, "must be a finite number"),
        ({"name": "sentiment", "kwargs": 3}, "must be a mapping"),
        ([], "rewards is empty"),
        (None, "rewards is empty"),
        ("no_such_package.module:function", "there is no module 'no_such_package'"),
        ("quintain.rewards:no_such", "has no 'no_such'"),
    ],
)
def test_what_cannot_be_resolved_is_refused_with_the_known_choices(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_rewards(spec)


def test_settings_of_a_function_are_checked_against_its_signature(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"has no setting 'valu'\. Did you mean 'value'"):
        resolve_rewards({"name": f"{own_module}:Grader", "kwargs": {"valu": 2.0}})
