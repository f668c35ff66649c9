"""The model inside an adapter's wrapper."""

from __future__ import annotations

from typing import Any

from torch import nn


def unwrapped(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
