"""`quintain train`: from a recipe to a trained model in a run's folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintain.configs.load import Recipe, load_recipe, parse_arguments, read_recipe, recipe_from_dict
from quintain.configs.runfolder import config_of_run, remove_run
from quintain.configs.shared import OnlineRLConfig
from quintain.errors import ConfigError

if TYPE_CHECKING:
    from quintain.trainers.base import OnlineRLTrainer


@dataclass(frozen=True)
class TrainOptions:
    """The command line of `quintain train`."""

    recipe: str | None
    overrides: dict[str, Any]
    resume: Path | None
    overwrite: bool
    profile: bool
    help: bool


def train(arguments: Sequence[str]) -> int:
    """Run `quintain train` and return its exit status."""
    options = parse_options(arguments)
    if options.help:
        from quintain.cli.help import train_help

        print(train_help(options.recipe, options.overrides))
        return 0
    recipe = resolve_recipe(options)
    folder = Path(recipe.config.output_dir)
    # With several processes, the first one owns the folder and the terminal.
    leads = os.environ.get("RANK", "0") == "0"
    if leads:
        print(summary(recipe, options.resume), file=sys.stderr)
    if not sys.stderr.isatty():
        plain_output()
    trainer = build_trainer(recipe)
    trainer.run.settings = recipe.to_dict()
    if leads and options.overwrite:
        # Only now: a recipe that cannot be built must not cost anyone an earlier run.
        remove_run(folder)
    if options.profile:
        from quintain.trainers.profiling import profile_step

        profile_step(trainer)
    trainer.train(resume_from=options.resume)
    if trainer.run.interrupted:
        return 130
    if leads:
        print(f"The policy is in {folder / 'model'}, the report in {folder / 'report.html'}.", file=sys.stderr)
    return 0


def plain_output() -> None:
    """Keep libraries' progress bars out of output that is not a terminal, where each redraw would be a line."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()


def parse_options(arguments: Sequence[str]) -> TrainOptions:
    """Read the command line. Raises ConfigError if it names no recipe, or contradicts itself."""
    flags = {"--overwrite", "--profile", "-h", "--help"}
    words, overrides = parse_arguments([argument for argument in arguments if argument not in flags])
    resume = overrides.pop("resume", None)
    options = TrainOptions(
        recipe=words[0] if words else None,
        overrides=overrides,
        resume=None if resume is None else Path(str(resume)),
        overwrite="--overwrite" in arguments,
        profile="--profile" in arguments,
        help="-h" in arguments or "--help" in arguments,
    )
    if len(words) > 1:
        raise ConfigError(f"One recipe at a time: got {' and '.join(words)}. Settings are given as --field value.")
    if options.recipe is None and options.resume is None and not options.help:
        raise ConfigError("No recipe is named. Try `quintain train quickstart`, or `quintain train --help`.")
    if options.resume is not None and options.overwrite:
        raise ConfigError("--resume continues a run and --overwrite deletes it. Give one of them.")
    for name in ("algorithm", "output_dir"):
        if options.resume is not None and name in overrides:
            raise ConfigError(
                f"--resume continues a run as it is: --{name} cannot be changed. Start a new run instead."
            )
    return options


def resolve_recipe(options: TrainOptions) -> Recipe:
    """The recipe named on the command line; for a run that is resumed, the one in its config.yaml."""
    if options.resume is None:
        assert options.recipe is not None
        return load_recipe(options.recipe, options.overrides)
    if options.recipe is not None:
        print(f"note: resuming with the settings in {options.resume}, not those of {options.recipe}.", file=sys.stderr)
    path = config_of_run(options.resume)
    settings = read_recipe(path)
    if "dataset" not in settings:
        raise ConfigError(
            f"The run in {options.resume} was started from Python, where its data is: continue it there, with "
            f"trainer.train(resume_from={str(options.resume)!r})."
        )
    # The folder may have been moved since the run wrote its own path into config.yaml.
    return recipe_from_dict(settings, {**options.overrides, "output_dir": str(options.resume)}, source=str(path))


def summary(recipe: Recipe, resume: Path | None = None) -> str:
    """What is about to happen, in a few plain lines."""
    config = recipe.config
    length = f"{config.max_steps} steps" if config.max_steps else f"{config.num_train_epochs:g} passes over the prompts"
    adapter = f", adapter {recipe.peft}" if recipe.peft else ""
    lines = [
        f"{'Resuming' if resume else 'Training'} {recipe.model} with {recipe.algorithm}{adapter}",
        f"  prompts: {recipe.dataset}, {config.prompts_per_step} a step, {config.num_generations} completions each, "
        f"up to {config.max_completion_length} tokens",
        f"  rewards: {reward_names(recipe.rewards)}",
        f"  updates: {length}, {config.num_epochs * config.num_mini_batches} optimizer steps for each, "
        f"learning rate {config.learning_rate:g}",
        *kl_line(config),
        f"  run:     {config.output_dir}, seed {config.seed}",
    ]
    return "\n".join(lines + [f"note: {note}" for note in recipe.notes])


def kl_line(config: OnlineRLConfig) -> list[str]:
    """How KL is weighed, estimated and steered, where it plays a part."""
    weights = [f"{name} {value:g}" for name in config.kl_weights if (value := getattr(config, name)) > 0]
    if not weights:
        return []
    slot = {"ref": "the model training starts from", "old": "the sampling policy", "target": "the target policy"}
    steered = f", adaptive to {config.target_kl:g} nats a completion" if config.kl_control == "adaptive" else ""
    estimator = f"estimated by {config.kl_estimator}"
    return [f"  KL:      {', '.join(weights)}{steered}; {estimator}, to {slot[config.reference_slot]}"]


def reward_names(rewards: Any) -> str:
    """The names in a recipe's `rewards`, with weights where they are given."""
    if isinstance(rewards, dict):
        weight = f" x {rewards['weight']}" if "weight" in rewards else ""
        return f"{rewards.get('name')}{weight}"
    return ", ".join(reward_names(item) for item in rewards) if isinstance(rewards, list) else str(rewards)


def trainer_class(algorithm: str) -> type[OnlineRLTrainer]:
    """The trainer of a known algorithm, or the class at "module:Class"."""
    import quintain
    from quintain.configs.load import import_by_path

    names = {
        "tpo": "TPOTrainer",
        "grpo": "GRPOTrainer",
        "rloo": "RLOOTrainer",
        "ppo": "PPOTrainer",
        "dg": "DGTrainer",
        "reinforce": "ReinforceTrainer",
    }
    found: type[OnlineRLTrainer]
    found = getattr(quintain, names[algorithm]) if algorithm in names else import_by_path(algorithm)
    return found


def build_trainer(recipe: Recipe) -> OnlineRLTrainer:
    """Load what the recipe names and put the trainer together."""
    from quintain.data import load_dataset_reference
    from quintain.rewards import resolve_rewards

    if recipe.model.startswith("scratch:") and "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)  # on a model this small, more threads only wait for each other
    trainer = trainer_class(recipe.algorithm)
    adapter = _adapter(recipe.peft)
    functions, weights = resolve_rewards(recipe.rewards)
    if weights is not None and recipe.config.reward_weights is None:
        recipe.config.reward_weights = tuple(weights)
    columns = recipe.dataset_columns
    dataset = load_dataset_reference(recipe.dataset, split=recipe.dataset_split, columns=columns)
    eval_dataset = None
    if recipe.eval_dataset is not None:
        eval_dataset = load_dataset_reference(
            recipe.eval_dataset, split=recipe.eval_dataset_split, columns=columns, default_split="test"
        )
    return trainer(
        model=recipe.model,
        reward_funcs=functions,
        args=recipe.config,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        peft_config=adapter,
    )


def _adapter(settings: dict[str, Any] | None) -> Any:
    """A LoRA configuration. Raises ConfigError for an argument that it does not have."""
    if settings is None:
        return None
    from peft import LoraConfig

    try:
        return LoraConfig(**{"task_type": "CAUSAL_LM", **settings})
    except TypeError as error:
        raise ConfigError(f"peft must hold arguments of peft.LoraConfig, such as {{r: 16}}: {error}.") from error
