"""A run's folder: config.yaml, and what belongs to a run."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from quintain.configs import GRPOConfig
from quintain.configs.load import load_recipe
from quintain.configs.runfolder import config_of_run, git_revision, holds_run, remove_run, set_aside_run, write_config
from quintain.errors import ConfigError


def test_config_holds_every_setting_and_where_it_ran(tmp_path):
    path = write_config(tmp_path / "run", GRPOConfig(stop_strings=("a",), learning_rate=1e-5).to_dict())
    data = yaml.safe_load(path.read_text())
    assert data["learning_rate"] == 1e-5 and data["stop_strings"] == ["a"] and data["seed"] == 42
    assert set(GRPOConfig().to_dict()) < set(data)
    assert {"python", "quintain", "torch", "transformers", "git_revision"} <= set(data["environment"])
    assert data["environment"]["torch"]


def test_a_written_config_is_a_recipe(tmp_path):
    recipe = load_recipe("tiny")
    assert load_recipe(write_config(tmp_path, recipe.to_dict())) == recipe


def test_secrets_are_left_out_at_any_depth(tmp_path):
    settings = {"model_init_kwargs": {"token": "s3cret", "nested": [{"api_key": "s3cret"}], "pad_token": "x"}}
    text = write_config(tmp_path, settings).read_text()
    assert "s3cret" not in text and "pad_token: x" in text


def test_values_without_a_plain_form_are_written_as_text(tmp_path):
    path = write_config(tmp_path, {"model_init_kwargs": {"dtype": int}})
    assert yaml.safe_load(path.read_text())["model_init_kwargs"] == {"dtype": "<class 'int'>"}


def test_git_revision_tells_a_modified_tree_and_tolerates_no_repository(tmp_path):
    assert git_revision(tmp_path) is None
    (tmp_path / "file").write_text("a")
    user = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "file"], [*user, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    head = git_revision(tmp_path)
    assert head is not None and len(head) == 40
    (tmp_path / "file").write_text("b")
    assert git_revision(tmp_path) == f"{head}-modified"


def test_git_revision_tolerates_a_machine_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision() is None


def test_removing_a_run_leaves_other_files_alone(tmp_path):
    write_config(tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    assert holds_run(tmp_path)
    remove_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert not holds_run(tmp_path)


def test_setting_a_run_aside_keeps_every_one(tmp_path):
    assert set_aside_run(tmp_path) is None
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(str(number))
        assert set_aside_run(tmp_path) == tmp_path / f"earlier-{number}"
    assert [(tmp_path / f"earlier-{number}" / "metrics.jsonl").read_text() for number in (1, 2)] == ["1", "2"]
    assert not holds_run(tmp_path)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="not a run's folder"):
        config_of_run(tmp_path)
