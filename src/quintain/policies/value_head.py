"""Critics for PPO: one value a completion token, from the policy's own backbone or from a model of its own."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quintain.errors import ConfigError
from quintain.policies.layout import Layout


class SharedValueHead(nn.Module):
    """A linear map from the policy's last hidden states to a value. It starts at zero: the critic's first word is 0.

    Args:
        hidden_size: width of the hidden states.
        detach: keep the value loss from reaching the backbone.
    """

    def __init__(self, hidden_size: int, *, detach: bool = False) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1, bias=False)
        nn.init.zeros_(self.score.weight)
        self.detach = detach

    def forward(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, " valid"]:
        """Value of the state before each valid completion token is drawn."""
        hidden = self.states(layout, hidden)
        if self.detach:
            hidden = hidden.detach()
        return self.score(hidden.to(self.score.weight.dtype)).squeeze(-1)

    def states(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, "valid width"]:
        """What a value is read from: the policy's own hidden states."""
        return hidden


class SeparateValueModel(nn.Module):
    """A critic with weights of its own: the backbone and score layer of a sequence-classification model."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        if not hasattr(classifier, "score") or classifier.score.out_features != 1:  # type: ignore[union-attr]
            raise ConfigError(
                f"value_model must be a sequence-classification model with one label and a `score` layer: got "
                f"{type(classifier).__name__}. Load it with num_labels=1."
            )
        self.classifier = classifier

    def forward(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, " valid"]:
        """Value of the state before each valid completion token is drawn; `hidden`, the policy's, is not read."""
        return self.classifier.score(self.states(layout, hidden)).squeeze(-1)  # type: ignore[operator]

    def states(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, "valid width"]:
        """What a value is read from: the critic's own hidden states."""
        return layout.gather(self.classifier.base_model(**layout.inputs, use_cache=False).last_hidden_state)  # type: ignore[operator]


def classifier_from(language_model: Any) -> Any:
    """A sequence-classification model with one label, a copy of the language model's backbone, and a head of zeros."""
    from transformers import AutoModelForSequenceClassification

    config = type(language_model.config).from_dict({**language_model.config.to_dict(), "num_labels": 1})
    with torch.device("cpu"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.base_model.load_state_dict(language_model.base_model.state_dict())
    nn.init.zeros_(classifier.score.weight)
    return classifier


def as_classifier(language_model: Any, value_model: nn.Module) -> nn.Module:
    """The critic as a sequence-classification model that `save_pretrained` can write and anyone can load.

    A shared head is joined to a copy of the policy's backbone, since its values mean nothing without it.
    """
    if isinstance(value_model, SeparateValueModel):
        return value_model.classifier
    classifier: nn.Module = classifier_from(language_model)
    with torch.no_grad():
        classifier.score.weight.copy_(value_model.score.weight)  # type: ignore[union-attr, arg-type, operator]
    return classifier
