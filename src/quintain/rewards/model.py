"""A reward model: a sequence-classification model that gives a prompt and its completion one number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from quintain.errors import ConfigError, RewardError, nearest
from quintain.types import PromptText

OVERLONG = ("error", "cut_left")
NO_LIMIT = 10**9
"""Tokenizers without a length limit report an absurdly large one."""


class RewardModel:
    """Scores prompt + completion with any sequence-classification model that has one output.

    Chat prompts are written out with the tokenizer's own chat template, plain ones are joined and given the special
    tokens that the tokenizer adds by default. Every score is what the model gives for that text alone: batches are
    padded on the right with the id that the model itself skips when it looks for the last token.

    Args:
        model: a loaded model, a Hub id, or a folder. Ids and folders are loaded from safetensors, without remote code.
        tokenizer: None: the one saved with the model.
        batch_size: texts in one forward.
        max_length: in tokens, prompt and completion together; None: the smaller limit of the tokenizer and the model.
        overlong: what happens to a longer text. "error": RewardError; "cut_left": its first tokens are dropped, and
            the metric `rewards/{name}/cut_fraction` counts how often.
        device: where a model given by id or folder goes; a loaded one stays where it is.
    Raises:
        ConfigError: the model has no trained head or more than one output, or no tokenizer can be found.
    """

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str],
        tokenizer: Any = None,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        overlong: Literal["error", "cut_left"] = "error",
        device: torch.device | str | None = None,
    ) -> None:
        if overlong not in OVERLONG:
            raise ConfigError(f"overlong must be 'error' or 'cut_left': got {overlong!r}.{nearest(overlong, OVERLONG)}")
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} of a reward model must be at least 1: got {value}.")
        self.model = model if isinstance(model, nn.Module) else _load(os.fspath(model))
        if device is not None and self.model is not model:
            self.model.to(device)
        self.model.eval()
        self.config = getattr(self.model, "config", None)
        source = getattr(self.config, "_name_or_path", "") or ""
        self.tokenizer = tokenizer if tokenizer is not None else _own_tokenizer(source)
        self.batch_size = batch_size
        self.max_length = max_length or _length_limit(self.tokenizer, self.config)
        self.overlong = overlong
        self.__name__ = os.path.basename(os.path.normpath(source)) if source else type(self.model).__name__
        labels = getattr(self.config, "num_labels", 1)
        if labels != 1:
            raise ConfigError(
                f"a reward model must have one output: {self.__name__} has num_labels={labels}. Load it with "
                "num_labels=1, or pass a function that turns its outputs into one number."
            )

    def to(self, device: torch.device | str) -> RewardModel:
        self.model.to(device)
        return self

    def __call__(
        self,
        prompts: Sequence[PromptText],
        completions: Sequence[PromptText],
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float]:
        """One score a completion."""
        token_ids = [self._encode(prompt, completion) for prompt, completion in zip(prompts, completions)]
        token_ids = self._fit(token_ids, log_metric)
        # Texts of like length share a batch: less padding.
        order = sorted(range(len(token_ids)), key=lambda row: len(token_ids[row]))
        scores = [0.0] * len(token_ids)
        self.model.eval()
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            for row, score in zip(rows, self._forward([token_ids[row] for row in rows]).tolist()):
                scores[row] = score
        return scores

    def _encode(self, prompt: PromptText, completion: PromptText) -> list[int]:
        if isinstance(prompt, str) and isinstance(completion, str):
            return list(self.tokenizer(prompt + completion)["input_ids"])
        if not getattr(self.tokenizer, "chat_template", None):
            raise RewardError(
                f"the prompts are chat messages, but the tokenizer of reward model {self.__name__} has no chat "
                "template. Set its chat_template, or pass a tokenizer that has one in reward_processing_classes."
            )
        text = self.tokenizer.apply_chat_template(
            _messages(prompt, "user") + _messages(completion, "assistant"), tokenize=False
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written them

    def _fit(self, token_ids: list[list[int]], log_metric: Callable[[str, float], None] | None) -> list[list[int]]:
        """Refuse or cut texts beyond the limit, and refuse empty ones."""
        for row, ids in enumerate(token_ids):
            if not ids:
                raise RewardError(f"reward model {self.__name__}: prompt and completion of row {row} have no tokens.")
        overlong = [row for row, ids in enumerate(token_ids) if self.max_length and len(ids) > self.max_length]
        if overlong and self.overlong == "error":
            row = overlong[0]
            raise RewardError(
                f"reward model {self.__name__}: row {row} has {len(token_ids[row])} tokens, the limit is "
                f"{self.max_length}. Shorten max_prompt_length or max_completion_length, or use "
                "RewardModel(..., overlong='cut_left')."
            )
        if self.overlong == "cut_left" and log_metric is not None:
            log_metric(f"rewards/{self.__name__}/cut_fraction", len(overlong) / max(1, len(token_ids)))
        return [ids[-self.max_length :] for ids in token_ids] if overlong and self.max_length else token_ids

    @torch.no_grad()
    def _forward(self, token_ids: list[list[int]]) -> Float[Tensor, " batch"]:
        device = next(self.model.parameters()).device
        length = max(len(ids) for ids in token_ids)
        with self._pad_token_id(token_ids) as pad_token_id:
            input_ids = torch.tensor([ids + [pad_token_id] * (length - len(ids)) for ids in token_ids], device=device)
            mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in token_ids], device=device)
            logits = self.model(input_ids=input_ids, attention_mask=mask).logits
        if logits.shape != (len(token_ids), 1):
            raise RewardError(
                f"reward model {self.__name__} must return logits of shape ({len(token_ids)}, 1): got "
                f"{tuple(logits.shape)}."
            )
        return logits[:, 0].float()

    @contextlib.contextmanager
    def _pad_token_id(self, token_ids: list[list[int]]) -> Iterator[int]:
        """The id to pad with, which the model knows as padding for the time of a forward.

        Decoder models find the last token by comparing ids with `config.pad_token_id`. Where that is set, padding with
        it (not with the tokenizer's idea of padding) gives what the text alone would. Where it is not, the model reads
        the very last position of a text alone and refuses batches: lend it an id that no text ends with.
        """
        config = _text_config(self.config)
        own = getattr(config, "pad_token_id", None)
        if own is not None or config is None:
            yield own or 0
            return
        endings = {ids[-1] for ids in token_ids}
        config.pad_token_id = next(token for token in range(len(endings) + 1) if token not in endings)
        try:
            yield config.pad_token_id
        finally:
            config.pad_token_id = None


def _messages(text: PromptText, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _load(source: str) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    model, loading = AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=1, use_safetensors=True, output_loading_info=True
    )
    # A language model loads here too, with a random head in place of a trained one.
    if loading["missing_keys"]:
        raise ConfigError(
            f"{source} is not a reward model: its weights lack {', '.join(sorted(loading['missing_keys'])[:3])}, which "
            "would be random. Use a model trained for sequence classification with one output."
        )
    return model


def _text_config(config: Any) -> Any:
    """The part of a model's config that is about text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _own_tokenizer(source: str) -> Any:
    if not source:
        raise ConfigError(
            "a reward model that was not loaded from an id or folder needs its tokenizer: pass it in "
            "reward_processing_classes, or as RewardModel(model, tokenizer)."
        )
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def _length_limit(tokenizer: Any, config: Any) -> int | None:
    """The most tokens that both tokenizer and model can take, or None if neither states a limit."""
    stated = (
        getattr(tokenizer, "model_max_length", None),
        getattr(_text_config(config), "max_position_embeddings", None),
    )
    return min((limit for limit in stated if limit and limit < NO_LIMIT), default=None)
