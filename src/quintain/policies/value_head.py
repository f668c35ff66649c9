"""Critics for PPO: one value a completion token, from the policy's own backbone or from a model of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quintain.errors import ConfigError
from quintain.policies.layout import Layout
from quintain.policies.loading import merged


class SharedValueHead(nn.Module):
    """A linear map from the policy's last hidden states to a value. It starts at zero: the critic's first word is 0.

    Args:
        hidden_size: width of the hidden states.
        detach: keep the value loss from reaching the backbone.
    """

    def __init__(self, hidden_size: int, *, detach: bool = False) -> None:
        super().__init__()
        self.score = _zero_score(hidden_size)
        self.detach = detach

    def forward(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, " valid"]:
        """Value of the state before each valid completion token is drawn."""
        return self.read(self.states(layout, hidden))

    def states(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, "valid width"]:
        """What a value is read from: the policy's own hidden states."""
        return hidden

    def read(self, hidden: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes"]:
        """The value of each state; a rollout engine asks for it while it samples."""
        return _read(self.score, hidden.detach() if self.detach else hidden)


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
        return _read(self.classifier.score, self.states(layout, hidden))  # type: ignore[arg-type]

    def states(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, "valid width"]:
        """What a value is read from: the critic's own hidden states."""
        return layout.gather(self.classifier.base_model(**layout.inputs, use_cache=False).last_hidden_state)  # type: ignore[operator]


class AdapterValueModel(nn.Module):
    """A critic for a policy with an adapter: an adapter of its own on the same frozen backbone, and a head of zeros.

    The backbone belongs to the policy and exists once. Where the policy has trainable weights in it, the critic has its
    own, started from the policy's and put in their place for the length of its forward pass.

    Args:
        language_model: a PEFT-wrapped causal language model.
    Raises:
        ConfigError: no weight of the backbone is trainable.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        backbone = language_model.get_base_model().base_model
        theirs = {name: value for name, value in backbone.named_parameters() if value.requires_grad}
        if not theirs:
            raise ConfigError(
                "value_model='separate' beside an adapter needs an adapter inside the backbone, and this one trains "
                "nothing there. Widen its target_modules, or use value_model='shared'."
            )
        self._backbone = (backbone,)  # in a tuple: registered here too, its weights would count twice
        self._places = {name.replace(".", "/"): _place(backbone, name) for name in theirs}
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(value.detach().clone()) for name, value in theirs.items()}
        )
        self.score = _zero_score(backbone.config.get_text_config().hidden_size)
        self._in_place = False

    def forward(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, " valid"]:
        """Value of the state before each valid completion token is drawn; `hidden`, the policy's, is not read."""
        return _read(self.score, self.states(layout, hidden))

    def states(self, layout: Layout, hidden: Float[Tensor, "valid width"]) -> Float[Tensor, "valid width"]:
        """What a value is read from: the backbone's hidden states under the critic's adapter."""
        with self.in_place():
            return layout.gather(self._backbone[0](**layout.inputs, use_cache=False).last_hidden_state)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the backbone compute with the critic's adapter; gradients reach the critic's and not the policy's."""
        policys = {key: module._parameters[name] for key, (module, name) in self._places.items()}
        self._install(self.adapter, True)
        try:
            yield
        finally:
            self._install(policys, False)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For gradient checkpointing: a layer is recomputed with the adapter that it was first computed with."""
        return nullcontext(), self.in_place() if self._in_place else nullcontext()

    def _install(self, parameters: Mapping[str, Any], ours: bool) -> None:
        for key, (module, name) in self._places.items():
            module._parameters[name] = parameters[key]
        self._in_place = ours


def _place(module: nn.Module, parameter_name: str) -> tuple[nn.Module, str]:
    path, _, name = parameter_name.rpartition(".")
    return module.get_submodule(path), name


def _read(score: nn.Linear, states: Float[Tensor, "valid width"]) -> Float[Tensor, " valid"]:
    """The head's number for each state, in the head's own precision: autocast would round it to 8 bits."""
    with torch.autocast(states.device.type, enabled=False):
        return score(states.to(score.weight.dtype)).squeeze(-1)


def _zero_score(hidden_size: int) -> nn.Linear:
    score = nn.Linear(hidden_size, 1, bias=False)
    nn.init.zeros_(score.weight)
    return score


def classifier_from(language_model: Any) -> Any:
    """A sequence-classification model with one label, a copy of the language model's backbone, and a head of zeros."""
    from transformers import AutoModelForSequenceClassification

    labels = {"num_labels": 1, "id2label": {0: "value"}, "label2id": {"value": 0}}
    config = type(language_model.config).from_dict({**language_model.config.to_dict(), **labels})
    with torch.device("cpu"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.base_model.load_state_dict(language_model.base_model.state_dict())
    nn.init.zeros_(classifier.score.weight)
    return classifier


def as_classifier(language_model: Any, value_model: nn.Module) -> nn.Module:
    """The critic as a sequence-classification model that `save_pretrained` can write and anyone can load.

    A critic on the policy's backbone is joined to a copy of it, since its values mean nothing without: a shared head to
    the policy's weights, an adapter merged into the frozen ones.
    """
    if isinstance(value_model, SeparateValueModel):
        return value_model.classifier
    with value_model.in_place() if isinstance(value_model, AdapterValueModel) else nullcontext():
        classifier: nn.Module = classifier_from(merged(language_model))
    with torch.no_grad():
        classifier.score.weight.copy_(value_model.score.weight)  # type: ignore[union-attr, arg-type, operator]
    return classifier
