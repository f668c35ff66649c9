"""PPO from a loop of your own: sample, score however you like, and hand the tokens to `step`.

    python examples/ppo_manual_loop.py

Under a minute on a CPU, no download.
"""

from itertools import pairwise

from quintain import PPOConfig, PPOTrainer

QUERIES = [f"{digit}>" for digit in "01234567"] * 8


def rising(text):
    """Share of neighbouring digits that rise."""
    return sum(a < b for a, b in pairwise(text)) / 3


def main():
    trainer = PPOTrainer(
        model="scratch:tiny",
        args=PPOConfig(
            output_dir="runs/ppo-manual-loop",
            model_init_kwargs={"characters": "0123456789>"},
            max_completion_length=4,
            learning_rate=1e-3,
            num_epochs=2,
            kl_coef=0.01,
        ),
    )
    for step in range(60):
        responses = trainer.generate(QUERIES, min_new_tokens=4)
        texts = [trainer.processing_class.decode(response, skip_special_tokens=True) for response in responses]
        stats = trainer.step(QUERIES, responses, [rising(text) for text in texts])
        if step % 10 == 9:
            trainer.log_training_stats(stats)


if __name__ == "__main__":
    main()
