"""Two data-parallel processes take the step that one takes, also when they have different numbers of micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("data_parallel_worker.py")


@pytest.mark.slow
def test_two_processes_take_the_same_step_as_one(tmp_path):
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for program in ([sys.executable], launch):
        command = [*program, str(WORKER), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
    one, first, second = (json.loads((tmp_path / name).read_text()) for name in ("1-0.json", "2-0.json", "2-1.json"))
    assert (one["processes"], first["processes"]) == (1, 2)
    assert first == second
    assert first["weights"] == pytest.approx(one["weights"], abs=1e-5)
    assert first["kl_coef"] == pytest.approx(one["kl_coef"], rel=1e-4)
