"""Write the trained models so that `from_pretrained` loads them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from quintain.policies.value_head import as_classifier

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer


def save_policy(trainer: OnlineRLTrainer, folder: Path) -> None:
    """The policy and its tokenizer. An adapter is merged into a copy of its base, and kept on its own beside it."""
    model = trainer.model
    if hasattr(model, "merge_and_unload"):
        model.save_pretrained(folder.with_name("adapter"))
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)


def save_value_model(trainer: OnlineRLTrainer, folder: Path) -> None:
    """The critic as a sequence-classification model with one label, where the trainer has one."""
    value_model = trainer.policies.unwrapped.value_model
    if value_model is None:
        return
    model = trainer.model
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    as_classifier(model, value_model).save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
