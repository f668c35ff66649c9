"""What the paper reports (Kaddour 2026, arXiv:2604.06159), to be set beside what is measured here."""

from __future__ import annotations

Errors = dict[str, dict[int, float]]
"""Final exact-match error in percent, by algorithm and length."""

NO_LEARNING = 95.0
"""The paper prints a dash for "above 95%"; this number stands for it, and is printed as "> 95"."""

SAME_NAME = {"grpo-sequence": "grpo", "grpo-sequence-no-kl": "grpo-no-kl"}
"""Algorithms that go by another name in the paper: its GRPO has one ratio a completion."""

TABLE_3: dict[str, Errors] = {
    "prompts": {
        "tpo": {7: 6.9, 8: 8.6, 9: 6.1, 10: 7.4},
        "grpo": {7: 14.5, 8: 27.6, 9: 30.0, 10: 50.4},
        "grpo-no-kl": {7: 66.6, 8: 92.5, 9: NO_LEARNING, 10: NO_LEARNING},
        "ppo": {7: 12.0, 8: 26.3, 9: 90.6, 10: NO_LEARNING},
        "dg": {7: 33.8, 8: 58.8, 9: NO_LEARNING, 10: NO_LEARNING},
    },
    "interactions": {
        "tpo": {7: 1.8, 8: 2.8, 9: 5.3, 10: 19.0},
        "grpo": {7: 9.6, 8: 23.2, 9: 36.2, 10: 48.7},
        "grpo-no-kl": {7: 78.1, 8: 83.8, 9: NO_LEARNING, 10: NO_LEARNING},
        "ppo": {7: 38.6, 8: 62.1, 9: 66.2, 10: NO_LEARNING},
        "dg": {7: 47.7, 8: 69.4, 9: NO_LEARNING, 10: NO_LEARNING},
    },
}
"""Table 3: mean over 20 seeds, at 100 prompts a step ("prompts") or 800 completions a step ("interactions")."""

FIGURE_EPOCHS: Errors = {
    "tpo": {1: 0.02, 4: 0.05},
    "grpo": {1: 4.3, 2: 37.6, 4: 6.3, 8: 3.3, 16: 1.1},
}
"""Section 4.3, 30 seeds, by epochs a rollout, at H = 8, 256 prompts and 32 completions each. TPO: always below 2.3."""

FIGURE_GROUPS: Errors = {
    "tpo": {4: 8.9, 8: 5.2, 16: 5.1, 32: 2.6, 64: 0.36},
    "grpo": {4: 19.4, 8: 19.8, 16: 9.2, 32: 4.4, 64: 5.6},
}
"""Section 4.2, 30 seeds, by completions a prompt, at H = 8 and 4 epochs."""

FIGURE_ANCHOR: Errors = {
    "tpo": {7: 6.9, 8: 8.6, 10: 7.4},
    "tpo-no-anchor": {10: 99.0},
    "group-pg": {10: 99.0},
    "grpo-no-kl": {7: 66.6, 8: 92.5, 10: 99.0},
}
"""Section 3.7: "every ablation exceeds 99%" at H = 10."""


def reported(errors: Errors, algorithm: str, value: int) -> float | None:
    """What the paper has for an algorithm at a length (or epochs, or completions a prompt); None if nothing."""
    return errors.get(SAME_NAME.get(algorithm, algorithm), {}).get(value)
