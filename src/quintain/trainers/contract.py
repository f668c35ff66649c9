"""What an algorithm must define and return, checked where its author can still tell what went wrong."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quintain.errors import ConfigError
from quintain.types import LossOutput, LossTerm, Rollouts


def check_algorithm(trainer_class: type, base: type) -> None:
    """Refuse a trainer class that does not define `estimate` and `loss`, before anything is loaded for it.

    Raises:
        ConfigError: names the class and the missing method.
    """
    for name, meaning in (
        ("estimate", "rollouts -> rollouts with a training signal"),
        ("loss", "outputs, rollouts -> LossOutput"),
    ):
        if getattr(trainer_class, name) is getattr(base, name):
            raise ConfigError(f"{trainer_class.__name__} must define {name} ({meaning}); see docs/add-an-algorithm.md.")


def checked_estimate(result: Any, trainer: object) -> Rollouts:
    """What `estimate` returned, if it is rollouts."""
    if not isinstance(result, Rollouts):
        raise TypeError(
            f"{type(trainer).__name__}.estimate must return Rollouts, such as rollouts.replace(advantages=...): "
            f"got {type(result).__name__}."
        )
    return result


def checked_loss(result: Any, trainer: object) -> LossOutput:
    """What `loss` returned, if it is terms that say what they are averaged over."""
    name = type(trainer).__name__
    if not isinstance(result, LossOutput):
        raise TypeError(
            f"{name}.loss must return a LossOutput, such as "
            f"LossOutput({{'policy': self.aggregate(per_token, rollouts)}}): got {type(result).__name__}."
        )
    for term_name, term in result.terms.items():
        if not isinstance(term, LossTerm):
            raise TypeError(
                f"term {term_name!r} of {name}.loss must be a LossTerm(total, unit), such as self.aggregate(per_token, "
                f"rollouts) returns: got {type(term).__name__}."
            )
    return result


def checked_tokens(result: Any, tokens: int, trainer: object, name: str) -> Tensor:
    """What a hook such as `actor_loss` returned, if it is the loss of each valid token or their mean."""
    if isinstance(result, Tensor) and result.shape in ((), (tokens,)):
        return result
    got = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
    raise TypeError(
        f"{type(trainer).__name__}.{name} must return the loss of each of the {tokens} valid tokens, or their mean: "
        f"got {got}."
    )


def checked_advantages(result: Any, mask: Tensor, trainer: object) -> tuple[Tensor, Tensor]:
    """What `compute_advantages` returned, if it is advantages and returns of every token."""
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) == 2 and all(isinstance(part, Tensor) and part.shape == mask.shape for part in parts):
        return parts
    shapes = ", ".join(str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
    raise TypeError(
        f"{type(trainer).__name__}.compute_advantages must return two tensors {list(mask.shape)}, advantages and "
        f"returns: got {shapes}."
    )
