"""Recipes: flat YAML, found by path or name, with overrides; whatever is not known is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quintain.configs import GRPOConfig, PPOConfig, TPOConfig
from quintain.configs.load import (
    CONFIG_CLASSES,
    find_recipe,
    load_recipe,
    parse_arguments,
    recipe_from_dict,
)
from quintain.configs.yaml_text import read_yaml, write_yaml
from quintain.errors import ConfigError

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))

BASE = {"algorithm": "tpo", "model": "scratch:tiny", "dataset": "builtin:reversal", "rewards": "exact_match"}


@pytest.fixture
def recipe_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_recipe_becomes_a_checked_config(recipe_file):
    path = recipe_file(
        "algorithm: grpo\nmodel: some/model\ndataset: builtin:stories\nrewards: [{name: sentiment, weight: 0.5}]\n"
        'peft: {r: 16}\nlearning_rate: 1e-5\nstop_strings: ["\\n"]\n'
    )
    recipe = load_recipe(path)
    assert type(recipe.config) is GRPOConfig
    assert (recipe.model, recipe.dataset, recipe.peft) == ("some/model", "builtin:stories", {"r": 16})
    assert recipe.rewards == [{"name": "sentiment", "weight": 0.5}]
    assert recipe.config.learning_rate == 1e-5 and recipe.config.stop_strings == ("\n",)


def test_overrides_win_over_the_file(recipe_file):
    path = recipe_file(yaml.safe_dump({**BASE, "learning_rate": 1e-5}))
    recipe = load_recipe(path, {"learning_rate": 0.5, "model": "another", "eta": 2.0})
    assert (recipe.config.learning_rate, recipe.model, recipe.config.eta) == (0.5, "another", 2.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-05", 1e-5),
        ("-2E+3", -2000.0),
        (".5", 0.5),
        ("12", 12),
        ("1_000", 1000),
        ("010", 10.0),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("null", None),
        ("[1, a]", [1, "a"]),
        ("{r: 16}", {"r": 16}),
        ("runs/first", "runs/first"),
        ("pkg:a/b.gguf", "pkg:a/b.gguf"),
        ("1e5x", "1e5x"),
    ],
)
def test_values_read_as_people_mean_them(text, value):
    found = read_yaml(text, "test")
    assert found == value and type(found) is type(value)


def test_a_misspelt_key_is_refused_with_the_nearest_known_one(recipe_file):
    """T08 f."""
    with pytest.raises(ConfigError, match=r"'num_generatons'.*Did you mean 'num_generations'"):
        load_recipe(recipe_file(yaml.safe_dump({**BASE, "num_generatons": 4})))
    with pytest.raises(ConfigError, match=r"'datset'.*Did you mean 'dataset'"):
        recipe_from_dict({**BASE, "datset": "x"}, {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty.*algorithm, model, dataset, rewards"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "must be a mapping.*list"),
        ("just text", "must be a mapping.*str"),
        ("a: [1", "not valid YAML"),
        ("algorithm: tpo\nalgorithm: grpo\n", "'algorithm' is there twice"),
        ("model: x\n", "must name its algorithm.*None"),
        ("algorithm: tpo\nmodel: x\n", "lacks dataset and rewards"),
        ("algorithm: [tpo]\n", "must name its algorithm"),
    ],
)
def test_a_broken_file_is_refused_in_plain_words(recipe_file, text, said):
    """T08 g: an empty file is no TypeError."""
    with pytest.raises(ConfigError, match=said):
        load_recipe(recipe_file(text))


def test_a_setting_of_another_algorithm_is_refused_in_a_file():
    with pytest.raises(ConfigError, match="'cliprange' is a setting of ppo, not of tpo"):
        recipe_from_dict({**BASE, "cliprange": 0.2}, {})


def test_another_algorithm_on_the_command_line_drops_the_files_own_fields_with_a_note():
    data = {**BASE, "beta": 0.5, "loss_type": "policy_gradient", "eta": 2.0, "num_generations": 4}
    recipe = recipe_from_dict(data, {"algorithm": "grpo"})
    assert type(recipe.config) is GRPOConfig
    assert (recipe.config.beta, recipe.config.loss_type, recipe.config.num_generations) == (0.0, "dapo", 4)
    assert len(recipe.notes) == 1 and all(name in recipe.notes[0] for name in ("beta", "loss_type", "eta", "tpo"))


def test_an_unknown_key_stays_refused_under_another_algorithm():
    with pytest.raises(ConfigError, match="num_generatons"):
        recipe_from_dict({**BASE, "num_generatons": 4}, {"algorithm": "grpo"})


def test_an_override_for_the_new_algorithm_is_kept():
    recipe = recipe_from_dict({**BASE, "beta": 0.5}, {"algorithm": "grpo", "beta": 0.1})
    assert recipe.config.beta == 0.1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": 7}, "model must be text"),
        ({"peft": "lora"}, "peft must be a mapping"),
        ({"dataset_columns": ["a"]}, "dataset_columns must be a mapping"),
        ({"algorithm": "tppo"}, "'tppo' is not known.*Did you mean"),
    ],
)
def test_the_recipes_own_keys_are_checked(given, said):
    with pytest.raises(ConfigError, match=said):
        recipe_from_dict({**BASE, **given}, {})


def test_arguments_are_words_and_settings():
    words, overrides = parse_arguments(["quick", "--lr", "1e-5", "--top-k=5", "--stop_strings", "[a]", "--beta", "-1"])
    assert words == ["quick"]
    assert overrides == {"lr": 1e-5, "top_k": 5, "stop_strings": ["a"], "beta": -1}


@pytest.mark.parametrize("arguments", [["--beta"], ["--beta", "--eta", "1"], ["--beta", "1", "--beta=2"]])
def test_a_setting_without_value_or_given_twice_is_refused(arguments):
    with pytest.raises(ConfigError, match="--beta"):
        parse_arguments(arguments)


MODULE = """
from dataclasses import dataclass
from quintain.configs import OnlineRLConfig

@dataclass
class MyConfig(OnlineRLConfig):
    strength: float = 1.0

class MyTrainer:
    config_class = MyConfig

class NoConfig:
    pass
"""


@pytest.mark.parametrize("separator", [":", "."])
def test_a_trainer_of_ones_own_is_found_in_the_current_directory(tmp_path, monkeypatch, separator):
    monkeypatch.chdir(tmp_path)
    module = f"own_trainer_{ord(separator)}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    recipe = recipe_from_dict({**BASE, "algorithm": f"{module}{separator}MyTrainer", "strength": 2}, {})
    assert recipe.config.strength == 2
    with pytest.raises(ConfigError, match=r"no 'MyTrane'.*Did you mean 'MyTrainer'"):
        recipe_from_dict({**BASE, "algorithm": f"{module}{separator}MyTrane"}, {})
    with pytest.raises(ConfigError, match="config_class"):
        recipe_from_dict({**BASE, "algorithm": f"{module}{separator}NoConfig"}, {})


def test_a_missing_module_is_told_from_an_error_inside_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no module 'nowhere_at_all'"):
        recipe_from_dict({**BASE, "algorithm": "nowhere_at_all:Trainer"}, {})
    (tmp_path / "needs_another.py").write_text("import a_library_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        recipe_from_dict({**BASE, "algorithm": "needs_another:Trainer"}, {})


@pytest.mark.parametrize("algorithm", CONFIG_CLASSES)
def test_a_recipe_written_out_reads_back_as_itself(algorithm):
    """A run's config.yaml is a recipe."""
    recipe = recipe_from_dict({**BASE, "algorithm": algorithm, "stop_strings": ["a"], "peft": {"r": 4}}, {})
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.to_dict().items()}
    again = recipe_from_dict({**read_yaml(write_yaml(settings), "test"), "environment": {"python": "3"}}, {})
    assert again == recipe


PLAIN = st.text() | st.sampled_from(
    ["\x85", "a\u2028b", "1e-5", "no", "010", "01", "1_0", "null", "~", "1:30", ".inf", "+.5", "", "=", "<<"]
)


@given(
    st.recursive(PLAIN | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none(), st.lists, max_leaves=4)
)
def test_whatever_is_written_reads_back_as_it_was_in_both_versions_of_yaml(value):
    text = write_yaml({"key": value})
    assert read_yaml(text, "test") == {"key": value} and yaml.safe_load(text) == {"key": value}


def test_recipes_are_found_by_name_and_unknown_names_list_the_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("tiny").name == "tiny.yaml"
    with pytest.raises(ConfigError, match=r"'quickstrat'.*Did you mean 'quickstart'"):
        find_recipe("quickstrat")
    (tmp_path / "tiny").mkdir()
    assert find_recipe("tiny").name == "tiny.yaml"
    (tmp_path / "own.yaml").write_text("")
    assert find_recipe("own.yaml") == Path("own.yaml")


def test_the_expected_recipes_are_shipped():
    expected = {
        "quickstart",
        "quickstart-grpo",
        "quickstart-rloo",
        "quickstart-ppo",
        "tiny",
        "arithmetic",
        "arithmetic-ppo",
        "arithmetic-tpo",
        "arithmetic-rloo",
        "arithmetic-dg",
    }
    assert expected <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_valid_and_says_what_it_is(name):
    path = find_recipe(name)
    recipe = load_recipe(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#") and f"quintain train {name}" in text
    assert recipe.config.output_dir == f"runs/{name}" and recipe.notes == recipe.config.notes == []


@pytest.mark.parametrize("algorithm", CONFIG_CLASSES)
def test_the_tiny_recipe_takes_any_algorithm(algorithm):
    recipe = load_recipe("tiny", {"algorithm": algorithm})
    assert type(recipe.config) is CONFIG_CLASSES[algorithm]


def test_the_quickstarts_differ_in_the_algorithm_only():
    quickstart = load_recipe("quickstart")
    assert type(quickstart.config) is TPOConfig
    ppo = load_recipe("quickstart-ppo")
    assert type(ppo.config) is PPOConfig
    for name in ("quickstart-grpo", "quickstart-rloo", "quickstart-ppo"):
        other = load_recipe(name)
        assert (other.model, other.dataset, other.rewards) == (quickstart.model, quickstart.dataset, quickstart.rewards)
        assert other.config.completions_per_step == quickstart.config.completions_per_step


def test_the_arithmetic_recipes_ask_the_same_of_every_algorithm():
    arithmetic = load_recipe("arithmetic")
    same = ("learning_rate", "temperature", "max_completion_length", "max_steps", "completions_per_step")
    for name in ("arithmetic-tpo", "arithmetic-rloo", "arithmetic-dg", "arithmetic-ppo"):
        other = load_recipe(name)
        assert (other.model, other.dataset, other.rewards) == (arithmetic.model, arithmetic.dataset, arithmetic.rewards)
        assert [getattr(other.config, key) for key in same] == [getattr(arithmetic.config, key) for key in same]
