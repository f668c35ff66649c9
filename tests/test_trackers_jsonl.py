"""metrics.jsonl and its neighbours: appended, whole, and free of repeated steps after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from quintain.trackers import JsonlTracker


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_step_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    tracker = JsonlTracker(tmp_path / "run")
    tracker.log(1, {"reward": 0.5})
    tracker.log_completions([{"step": 1, "prompt": "p", "completion": "ü\n"}])
    tracker.log_findings([{"step": 1, "rule": "kl_jump"}])
    assert rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "reward": 0.5}]
    assert rows(tmp_path / "run" / "completions.jsonl") == [{"step": 1, "prompt": "p", "completion": "ü\n"}]
    assert rows(tmp_path / "run" / "findings.jsonl") == [{"step": 1, "rule": "kl_jump"}]
    tracker.close()


def test_every_line_is_strict_json(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"kl": float("nan"), "loss": float("inf"), "n": np.float32(0.5), "t": torch.tensor(2)})
    tracker.log_completions([{"step": 1, "rewards": torch.tensor([1.0, float("nan")]), "completion": "bad \ud800"}])
    tracker.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "kl": None, "loss": None, "n": 0.5, "t": 2}]
    assert rows(tmp_path / "completions.jsonl")[0]["rewards"] == [1.0, None]


@pytest.mark.parametrize("tail", ["", '{"step": 4, "rew', "\n"])
def test_resuming_removes_later_steps_and_a_torn_line_so_that_none_is_there_twice(tmp_path, tail):
    """T09: the log of a resumed run reads like an unbroken one."""
    tracker = JsonlTracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"reward": step / 10})
        tracker.log_completions([{"step": step, "row": row} for row in (0, 1)])
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    resumed = JsonlTracker(tmp_path, start_step=2)
    resumed.log(3, {"reward": 9.0})
    resumed.close()
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward": 0.1},
        {"step": 2, "reward": 0.2},
        {"step": 3, "reward": 9.0},
    ]
    assert [row["step"] for row in rows(tmp_path / "completions.jsonl")] == [1, 1, 2, 2]
    assert not list(tmp_path.glob(".*.partial"))


def test_a_fresh_run_starts_its_files_afresh(tmp_path):
    first = JsonlTracker(tmp_path)
    first.log(0, {"eval_reward": 0.0})
    first.log(1, {"reward": 1.0})
    first.close()
    second = JsonlTracker(tmp_path)
    second.log(1, {"reward": 2.0})
    second.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 2.0}]
