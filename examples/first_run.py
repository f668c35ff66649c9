"""Train from Python: a tiny transformer learns to write two characters backwards, with GRPO against an EMA target.

    python examples/first_run.py

Takes about fifteen seconds on a CPU and downloads nothing. For a real model, name it instead of "scratch:tiny" and drop
`model_init_kwargs`.
"""

from quintain import GRPOConfig, GRPOTrainer, log_training_stats

PROMPTS = [{"prompt": f"{a}{b}>", "answer": f"{b}{a}"} for a in "0123" for b in "0123"]


def right(completions, answer, **_):
    """1 for the right characters in the right order, else 0. `answer` is the dataset's column."""
    return [float(completion == expected) for completion, expected in zip(completions, answer)]


class Monitor:
    """A callback has the methods of transformers.TrainerCallback that it needs."""

    def on_log(self, args, state, control, logs, **_):
        if state.global_step % 20 == 0:
            log_training_stats(logs)


trainer = GRPOTrainer(
    model="scratch:tiny",
    reward_funcs=right,
    args=GRPOConfig(
        output_dir="runs/first",
        model_init_kwargs={"characters": "0123>"},
        use_target_policy=True,  # KL is measured against a moving average of the policy
        beta=0.04,
        prompts_per_step=16,
        num_generations=8,
        min_completion_length=2,
        max_completion_length=2,
        learning_rate=2e-3,
        max_steps=100,
        save_steps=None,
        logging_steps=100,
    ),
    train_dataset=PROMPTS,
    callbacks=[Monitor()],
)
trainer.train()
