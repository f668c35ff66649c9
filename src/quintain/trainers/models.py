"""From a model and its settings to what is trained: loaded, wrapped in an adapter, with a value model beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quintain.checkpoints.state import Generators
from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError
from quintain.policies.loading import clear_padding_idx, load_model, load_tokenizer
from quintain.policies.value_head import AdapterValueModel, SeparateValueModel, SharedValueHead, classifier_from


class ModelAssembly:
    """The part of `Assembly` that makes the models."""

    config: OnlineRLConfig
    generators: Generators
    model: Any
    value_model: nn.Module | None
    _reference: Any
    """The model as it was passed in: a name, or the loaded model."""

    def _load_tokenizer(self, model: Any) -> Any:
        return load_tokenizer(
            model,
            model_init_kwargs=self.config.model_init_kwargs,
            trust_remote_code=self.config.trust_remote_code,
        )

    def _load_model(self, model: Any) -> Any:
        if isinstance(model, nn.Module):
            if self.config.model_init_kwargs:
                raise ConfigError(
                    "model_init_kwargs is for a model given by name, and the model is loaded already: "
                    f"got {self.config.model_init_kwargs}. Pass one or the other."
                )
            return clear_padding_idx(model)
        loaded = load_model(
            model, model_init_kwargs=self.config.model_init_kwargs, trust_remote_code=self.config.trust_remote_code
        )
        return clear_padding_idx(loaded)

    def _wrap_peft(self, model: Any, peft_config: Any) -> Any:
        if peft_config is not None:
            from peft import PeftConfig, get_peft_model

            if not isinstance(peft_config, PeftConfig):
                raise ConfigError(
                    f"peft_config must be a PEFT configuration, such as LoraConfig(r=16): got {peft_config!r}. Only a "
                    f"recipe takes a mapping: peft: {{r: 16}}."
                )
            with _seeded(self.generators["init"]):
                model = get_peft_model(model, peft_config)
            _refuse_adapted_tied_embeddings(model)
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError(
                "an adapter of virtual prompt tokens cannot be trained here: they would shift the positions at which "
                "log-probabilities are read. Use an adapter of the weights, such as LoraConfig."
            )
        return model

    def _start_value_model(self, choice: Any) -> nn.Module | None:
        if choice is None:
            return None
        policy = self.model
        if isinstance(choice, str) and choice == "shared":
            hidden_size = policy.config.get_text_config().hidden_size
            return SharedValueHead(hidden_size, detach=self.config.detach_value_head)  # type: ignore[attr-defined]
        if isinstance(choice, str) and choice == "separate" and hasattr(policy, "get_base_model"):
            return AdapterValueModel(policy)
        with _seeded(self.generators["init"]):
            classifier = (
                classifier_from(policy)
                if isinstance(choice, str) and choice == "separate"
                else load_model(
                    choice,
                    model_init_kwargs=self._init_kwargs(choice),
                    trust_remote_code=self.config.trust_remote_code,
                    head="sequence_classification",
                )
            )
        _require_same_vocabulary(classifier, policy)
        return SeparateValueModel(clear_padding_idx(classifier))

    def _init_kwargs(self, other: Any) -> dict[str, Any] | None:
        """`model_init_kwargs` for another model than the policy, unless they are options of a different kind."""
        of_scratch = [isinstance(item, str) and item.startswith("scratch:") for item in (self._reference, other)]
        return None if isinstance(other, nn.Module) or len(set(of_scratch)) > 1 else self.config.model_init_kwargs

    def _checkpoint_activations(self) -> None:
        """Activations are recomputed in the backward pass, by the weights that computed them first."""
        options: dict[str, Any] = {"use_reentrant": False}
        if isinstance(self.value_model, AdapterValueModel):
            options["context_fn"] = self.value_model.checkpoint_contexts
        if isinstance(self.value_model, SeparateValueModel):
            self.value_model.classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(options))  # type: ignore[operator]
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if hasattr(self.model, "get_base_model"):
            self.model.enable_input_require_grads()


def _refuse_adapted_tied_embeddings(model: Any) -> None:
    """An adapter on input embeddings that are the output layer too would be merged into both, and change the policy."""
    base = model.get_base_model()
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    plain = getattr(embeddings, "base_layer", None)
    if plain is not None and head is not None and plain.weight is getattr(head, "base_layer", head).weight:
        raise ConfigError(
            "the adapter changes the input embeddings, which this model shares with its output layer: merged, it would "
            "change both. Name them in modules_to_save instead of target_modules, or leave them out."
        )


def _require_same_vocabulary(value_model: Any, policy: Any) -> None:
    """The value model reads the policy's token ids."""
    ours, its = (item.get_input_embeddings().num_embeddings for item in (policy, value_model))
    if its < ours:
        raise ConfigError(
            f"value_model must know the policy's token ids: it has {its} token embeddings, and the policy has {ours}. "
            f"Pass a model with the policy's tokenizer, or value_model='separate'."
        )


class _seeded:
    """Make the global generator follow one of ours for a while: libraries draw initial weights from the global one."""

    def __init__(self, generator: torch.Generator) -> None:
        self.seed = int(torch.randint(2**31, (1,), generator=generator))
        self.fork = torch.random.fork_rng(devices=[])

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)
