"""The paper's algorithms as trainers and settings of this package. A name may carry settings of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quintain.configs.yaml_text import read_yaml
from quintain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer

PAPER_TPO = {"group_logits": "logprob", "use_target_policy": False, "beta": 0.0}
PAPER_GRPO = {"group_std": "population", "kl_reference": "old", "kl_estimator": "k3", "beta": 0.04}
NO_KL = {"kl_reference": "auto", "beta": 0.0}


@dataclass(frozen=True)
class Algorithm:
    """One line of a table."""

    trainer: str
    """Module and class, imported when the run is made."""
    settings: dict[str, Any] = field(default_factory=dict)
    grouped: bool = True
    """Whether it samples several completions a prompt, and compares them."""
    own_settings: tuple[str, ...] = ()
    """Which of the settings came with the name."""

    def load(self) -> type[OnlineRLTrainer]:
        """The trainer class."""
        from importlib import import_module

        module, _, name = self.trainer.rpartition(".")
        found: type[OnlineRLTrainer] = getattr(import_module(module), name)
        return found


_VARIANTS, _TRAINERS = "quintain.reproduce.variants", "quintain.trainers"

ALGORITHMS: dict[str, Algorithm] = {
    "tpo": Algorithm(f"{_TRAINERS}.tpo.TPOTrainer", PAPER_TPO),
    "grpo": Algorithm(f"{_TRAINERS}.grpo.GRPOTrainer", PAPER_GRPO),
    "grpo-no-kl": Algorithm(f"{_TRAINERS}.grpo.GRPOTrainer", PAPER_GRPO | NO_KL),
    "ppo": Algorithm(f"{_VARIANTS}.CriticFreePPO", grouped=False),
    "dg": Algorithm(f"{_TRAINERS}.dg.DGTrainer", {"num_epochs": 1}, grouped=False),
    "tpo-default": Algorithm(f"{_TRAINERS}.tpo.TPOTrainer"),
    "tpo-no-anchor": Algorithm(f"{_VARIANTS}.TPOWithoutAnchor", PAPER_TPO),
    "tpo-no-ties": Algorithm(f"{_VARIANTS}.TPOWithoutTies", PAPER_TPO),
    "group-pg": Algorithm(f"{_VARIANTS}.GroupPG", PAPER_TPO),
    "grpo-sequence": Algorithm(f"{_VARIANTS}.SequenceGRPO", PAPER_GRPO),
    "grpo-sequence-no-kl": Algorithm(f"{_VARIANTS}.SequenceGRPO", PAPER_GRPO | NO_KL),
}
"""By the name that `--algorithms` takes: the five of table 3 first, then variants."""

TABLE_3 = ("tpo", "grpo", "grpo-no-kl", "ppo", "dg")
ANCHOR = ("tpo", "tpo-no-anchor", "group-pg", "grpo-no-kl")


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of a name such as "tpo" or "tpo+group_logits=logratio+eta=0.5".

    Raises:
        ConfigError: the algorithm or one of its settings is unknown, or a value is outside its range.
    """
    base, *settings = name.split("+")
    if base not in ALGORITHMS:
        raise ConfigError(
            f"--algorithms knows {', '.join(ALGORITHMS)}: got {base!r}.{nearest(base, ALGORITHMS)} Settings are "
            f"added as in tpo+group_logits=logratio."
        )
    found = ALGORITHMS[base]
    own: dict[str, Any] = {}
    for text in settings:
        key, value = _setting(text, name)
        if key in own:
            raise ConfigError(f"{name!r} gives {key} twice. Give it once.")
        own[key] = value
    return Algorithm(found.trainer, {**found.settings, **own}, found.grouped, tuple(own))


def _setting(text: str, name: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"a setting in --algorithms is written field=value, as in tpo+eta=0.5: got {name!r}.")
    return key, read_yaml(value, name)
