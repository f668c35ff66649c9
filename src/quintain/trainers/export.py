"""Write the trained models so that `from_pretrained` loads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintain.policies.loading import merged
from quintain.policies.value_head import as_classifier

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer


def save_models(trainer: OnlineRLTrainer, run: Path) -> None:
    """All that a run leaves to load: `model/`, and `adapter/` and `value_model/` where it has them."""
    save_policy(trainer, run / "model")
    save_adapter(trainer, run / "adapter")
    save_value_model(trainer, run / "value_model")


def save_policy(trainer: OnlineRLTrainer, folder: Path) -> None:
    """The policy and its tokenizer; an adapter is merged into a copy of its base."""
    model = merged(trainer.model)
    _allow_saving(model)
    model.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)


def save_adapter(trainer: OnlineRLTrainer, folder: Path) -> None:
    """The adapter on its own, where the policy has one."""
    if hasattr(trainer.model, "merge_and_unload"):
        trainer.model.save_pretrained(folder)


def save_value_model(trainer: OnlineRLTrainer, folder: Path) -> None:
    """The critic as a sequence-classification model with one label, where the trainer has one."""
    value_model = trainer.policies.module.value_model
    if value_model is None:
        return
    classifier: Any = as_classifier(trainer.model, value_model)
    if classifier.config.pad_token_id is None:  # without it, the loaded model refuses a batch
        classifier.config.pad_token_id = trainer.processing_class.pad_token_id
    classifier.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)


def _allow_saving(model: Any) -> None:
    """Turn `do_sample` on in generation defaults that set a temperature, say, without it.

    transformers loads such a model and refuses to write it; finding out at the end of training would lose the policy.
    """
    defaults = getattr(model, "generation_config", None)
    if defaults is None:
        return
    try:
        defaults.validate(strict=True)
    except ValueError:
        defaults.do_sample = True
