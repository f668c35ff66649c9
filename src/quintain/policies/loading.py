"""From a model reference (see `references.py`), or a loaded model, to a model that trains and its tokenizer."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from quintain.errors import ConfigError
from quintain.policies.references import ModelReference, resolve_reference
from quintain.policies.scratch import PRINTABLE, Head, check_scratch_options, scratch_model, scratch_tokenizer

_ARCHITECTURES = {"causal_lm": AutoModelForCausalLM, "sequence_classification": AutoModelForSequenceClassification}


def load_model(
    reference: str | os.PathLike[str] | PreTrainedModel,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype | None = None,
    head: Head = "causal_lm",
) -> PreTrainedModel:
    """The model a reference stands for, in evaluation mode, with a gradient for every embedding row.

    Args:
        reference: see `references.py`. A model that is loaded already is returned as it is, but for its
            embeddings' `padding_idx` (see `clear_padding_idx`).
        model_init_kwargs: for `from_pretrained`, and above the other arguments; for `scratch:tiny`, its options.
            `use_safetensors: false` asks for pickled weights, which can run code and are refused otherwise.
        trust_remote_code: run Python code that comes with the model.
        dtype: of the weights; None is float32, in which small updates are not rounded away.
        head: what the model ends in.
    Raises:
        ConfigError: the reference leads nowhere, or the settings contradict it.
    """
    if not isinstance(reference, (str, os.PathLike)):
        if model_init_kwargs:
            raise ConfigError(
                f"model_init_kwargs goes with a model given by name: got {sorted(model_init_kwargs)} together with a "
                f"loaded {type(reference).__name__}. Drop it, or give these to from_pretrained where you load it."
            )
        return clear_padding_idx(reference)
    found = resolve_reference(reference)
    options = {"dtype": dtype or "float32", "trust_remote_code": trust_remote_code, **(model_init_kwargs or {})}
    if "torch_dtype" in options:  # the name before transformers 5
        options["dtype"] = options.pop("torch_dtype")
    if found.kind == "scratch":
        check_scratch_options({name: value for name, value in options.items() if name != "trust_remote_code"})
        options.pop("trust_remote_code")
        model = scratch_model(head=head, **{**options, "dtype": _as_dtype(options["dtype"])})
    elif found.kind == "gguf":
        model = _load_gguf(found.location, head, options)
    else:
        model = _load_pretrained(found, head, options)
    return clear_padding_idx(model)


def load_tokenizer(
    reference: str | os.PathLike[str] | PreTrainedModel,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model reference, or to a model loaded from one, with a padding token.

    Args:
        reference: as for `load_model`; a loaded model is asked where it came from.
        model_init_kwargs: the model's; of these a tokenizer shares `revision`, `token`, `cache_dir`, `subfolder`,
            `local_files_only` and `trust_remote_code`, and for `scratch:tiny` the alphabet and the longest sequence.
        trust_remote_code: run Python code that comes with the tokenizer.
    Raises:
        ConfigError: there is no tokenizer to be found.
    """
    options = dict(model_init_kwargs or {})
    if not isinstance(reference, (str, os.PathLike)):
        config = reference.config
        options |= {"characters": getattr(config, "scratch_characters", PRINTABLE)}
        options |= {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
        reference = config.name_or_path
        if not reference:
            raise ConfigError(
                "The model does not say where it came from (its config.name_or_path is empty), so its tokenizer cannot "
                "be found. Pass the tokenizer as processing_class."
            )
    found = resolve_reference(reference)
    if found.kind == "scratch":
        known = ("characters", "max_position_embeddings")
        return scratch_tokenizer(**{name: options[name] for name in known if name in options})
    shared = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "trust_remote_code")
    options = {"trust_remote_code": trust_remote_code} | {name: options[name] for name in shared if name in options}
    location = found.location
    if found.kind == "gguf":
        _require_gguf(location)
        location, options["gguf_file"] = os.path.split(location)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No tokenizer could be loaded for {str(reference)!r}: {error} Pass one as processing_class."
        ) from error
    return ensure_pad_token(tokenizer)


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give a tokenizer without padding token its end-of-sequence token as padding (in place).

    Padding is told from content by explicit masks and never by comparing ids, so a sampled end-of-sequence token
    stays in the loss although it shares its id with the padding.

    Raises:
        ConfigError: there is neither a padding nor an end-of-sequence token.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"The tokenizer of {tokenizer.name_or_path!r} has neither a padding nor an end-of-sequence token. "
                f"Set tokenizer.eos_token to the token that ends a completion and pass it as processing_class."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def clear_padding_idx(model: PreTrainedModel) -> PreTrainedModel:
    """Set `padding_idx` of the input embeddings to None (in place), so that every row gets its gradient.

    An embedding with a `padding_idx` drops that row's gradient without a word. Where padding and end of sequence share
    an id, that is a token of every chat prompt: the row would be trained through tied output embeddings and not through
    the input. Padding itself needs no such rule: masks keep it out of the loss. The weights do not change.
    """
    for module in model.get_input_embeddings().modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def merged(model: Any) -> Any:
    """A model without adapter: a PEFT model's adapter is merged into a copy of its base, any other is returned."""
    return copy.deepcopy(model).merge_and_unload() if hasattr(model, "merge_and_unload") else model


def _load_pretrained(found: ModelReference, head: Head, options: dict[str, Any]) -> PreTrainedModel:
    """From a folder or the Hub, safetensors only unless the options say otherwise."""
    if options.setdefault("use_safetensors", True) and found.kind == "folder":
        folder = Path(found.location)
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles and not any(folder.glob("*.safetensors")):
            raise ConfigError(
                f"The weights in {found.location!r} are pickled ({pickles[0]}), which can run code when loaded. "
                f"Convert them to safetensors or, if you trust them, set model_init_kwargs: {{use_safetensors: false}}."
            )
    try:
        return _ARCHITECTURES[head].from_pretrained(found.location, **options)
    except OSError as error:
        where = "on the Hub or in its local cache" if found.kind == "hub" else "in the folder"
        raise ConfigError(
            f"The model {found.location!r} could not be loaded: its files were not all found {where}. "
            f"Only safetensors weights are read unless model_init_kwargs has use_safetensors: false. ({error})"
        ) from error


def _load_gguf(location: str, head: Head, options: dict[str, Any]) -> PreTrainedModel:
    """A dense model with the dequantised weights of a GGUF file."""
    _require_gguf(location)
    folder, file = os.path.split(location)
    # Where transformers can compute on packed weights it would keep them packed, and packed weights do not train.
    if hasattr(transformers, "GgufConfig"):
        options = {"quantization_config": transformers.GgufConfig(dequantize=True), **options}
    loaded = _ARCHITECTURES[head].from_pretrained(folder, gguf_file=file, **options)
    # transformers refuses to save or train what came from a quantised file, although the weights are dense by now.
    # A model of the same config takes over the tensors: tied ones stay tied, none is copied.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded).from_pretrained(None, config=config, state_dict=loaded.state_dict(), dtype=loaded.dtype)
    model.config.name_or_path = location
    return model


def _require_gguf(location: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"Reading {location!r} needs the gguf package. Install it: pip install gguf")


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A torch dtype from its name; "auto" is float32, for weights that no file has a say about."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = torch.float32 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype must name a torch dtype such as float32 or bfloat16: got {dtype!r}.")
    return found
