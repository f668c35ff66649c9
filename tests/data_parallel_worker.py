"""One data-parallel process of `test_data_parallel.py`: one step by hand on its share of eight completions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from quintain import GRPOConfig, GRPOTrainer

QUERIES = ["01="] * 4 + ["0" * 60 + "="] * 4
RESPONSES = [[4], [4, 5], [5, 5, 5], [5, 4], [4, 4, 4, 4], [5], [5, 5], [4, 2]]
SCORES = [1.0, 0.0, 0.0, 2.0, 1.0, 0.0, 3.0, 1.0]


def main(folder: Path) -> None:
    config = GRPOConfig(
        output_dir=str(folder / "run"),
        model_init_kwargs={"characters": "01="},
        max_completion_length=4,
        micro_batch_tokens=64,  # the second prompt needs a micro-batch a row, the first needs one
        learning_rate=1e-2,
        optim="sgd",
        max_grad_norm=None,
        beta=0.1,
        num_epochs=2,
        kl_control="adaptive",
        target_kl=0.01,
        kl_horizon=10,
    )
    trainer = GRPOTrainer("scratch:tiny", args=config)
    rank, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    share = slice(rank * 8 // processes, (rank + 1) * 8 // processes)
    trainer.step(QUERIES[share], RESPONSES[share], SCORES[share])
    weights = [float(value.detach().double().sum()) for value in trainer.policies.parameters.values()]
    result = {"processes": processes, "weights": weights, "kl_coef": trainer.kl_coef}
    (folder / f"{processes}-{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads would abort a process that ends before them


if __name__ == "__main__":
    main(Path(sys.argv[1]))
