"""PPO's advantages and critic: known answers through the whole trainer, padding, and remedies for a bad critic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    TrainerCallback,
)

from quintain import ConfigError, PPOConfig, PPOTrainer
from quintain.policies.loading import load_model

EOS, ZERO, ONE = 2, 4, 5
"""Tokens of a tokenizer for "01="."""

PLAIN = {"kl_coef": 0.0, "gamma": 1.0, "lam": 0.95, "whiten_advantages": False}

ONE_STEP = {
    "optim": "sgd",
    "learning_rate": 1.0,
    "max_grad_norm": None,
    "lr_scheduler_type": "constant",
    "num_epochs": 1,
}
"""One update a rollout, by minus the gradient itself."""


def weights(trainer, part="") -> dict[str, torch.Tensor]:
    """A copy of the weights of the "language_model", of the "value_model", or of both."""
    named = trainer.policies.parameters.items()
    return {name: value.detach().clone() for name, value in named if name.startswith(part)}


def changes(trainer, update) -> dict[str, torch.Tensor]:
    """By how much `update()` changes each weight. The weights are then what they were before."""
    before = weights(trainer)
    update()
    after = weights(trainer)
    with torch.no_grad():
        for name, value in trainer.policies.parameters.items():
            value.copy_(before[name])
    return {name: after[name] - before[name] for name in before}


def size(changed, part) -> float:
    """Norm of the changes of a part."""
    return float(torch.stack([value.norm() for name, value in changed.items() if name.startswith(part)]).norm())


def give_head_an_opinion(trainer, scale=1.0):
    """The head starts at zero, through which no gradient reaches the backbone."""
    head = trainer.policies.module.value_model.score.weight
    with torch.no_grad():
        head.copy_(scale * torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))


@torch.no_grad()
def values_alone(classifier, rollouts, row):
    """What a sequence-classification model says before each token of a completion, run by itself without padding."""
    prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
    completion = rollouts.completion_ids[row][rollouts.completion_mask[row]]
    states = classifier.base_model(input_ids=torch.cat([prompt, completion])[None]).last_hidden_state
    return classifier.score(states)[0, len(prompt) - 1 : -1, 0]


def say(trainer, monkeypatch, values):
    """Let the critic's recorded values be `values(rollouts)`, padding included."""
    annotate = trainer.policies.annotate

    def annotated(rollouts, **arguments):
        rollouts = annotate(rollouts, **arguments)
        return rollouts.replace(values=values(rollouts))

    monkeypatch.setattr(trainer.policies, "annotate", annotated)


# ---- advantages ------------------------------------------------------------------------------------------------------


class ThreeAndFiveTokens(PPOTrainer):
    """Completions of 3 tokens with their stop token, and of 5 that were cut off."""

    def generate(self, queries, **generation_kwargs):
        return [torch.tensor(row) for row in [[ZERO, ONE, EOS], [ZERO, ONE, ONE, ZERO, ONE]] * (len(queries) // 2)]


PADDING = [0.0, 9.0, 1e6, math.nan]


@pytest.mark.parametrize("padding", PADDING)
def test_advantages_of_known_values_whatever_stands_in_the_padding(padding, make_trainer, monkeypatch):
    """T04, S47: score 1, no KL, values 0.5; (0.857375, ...) would mean that the first pad slot took part."""
    trainer = make_trainer(
        ThreeAndFiveTokens,
        **PLAIN,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        min_completion_length=0,
        max_completion_length=5,
    )
    say(trainer, monkeypatch, lambda rollouts: torch.where(rollouts.completion_mask, 0.5, padding))
    rollouts = trainer.run_step().rollouts
    short, full = rollouts.advantages[0], rollouts.advantages[1]
    torch.testing.assert_close(short, torch.tensor([0.45125, 0.475, 0.5, 0.0, 0.0]))
    torch.testing.assert_close(full, torch.tensor([0.407253, 0.428687, 0.45125, 0.475, 0.5]), atol=1e-6, rtol=0)
    torch.testing.assert_close(rollouts.returns[0], torch.tensor([0.95125, 0.975, 1.0, 0.0, 0.0]))


def test_advantages_of_rewards_on_every_token(make_trainer, monkeypatch):
    """T04, S47, S56: rewards (0.1, -0.2, 1), values (0.2, 0.4, 0.6)."""
    trainer = make_trainer(
        PPOTrainer,
        **PLAIN,
        reward_funcs=lambda completions, **_: [[0.1, -0.2, 1.0]] * len(completions),
        min_completion_length=3,
        max_completion_length=3,
    )
    say(trainer, monkeypatch, lambda rollouts: torch.tensor([0.2, 0.4, 0.6]).repeat(8, 1))
    rollouts = trainer.run_step().rollouts
    torch.testing.assert_close(rollouts.advantages, torch.tensor([0.661, 0.38, 0.4]).expand(8, 3))
    torch.testing.assert_close(rollouts.returns, torch.tensor([0.861, 0.78, 1.0]).expand(8, 3))


def test_discount_and_lambda_of_the_config_are_used(make_trainer):
    """S47: gamma 0.5 and lambda 0.5, rewards (0, 4), values (1, 2): errors 0 + 1 - 1 = 0 and 4 - 2 = 2."""
    trainer = make_trainer(PPOTrainer, gamma=0.5, lam=0.5, whiten_advantages=False)
    mask = torch.ones(1, 2, dtype=torch.bool)
    advantages, returns = trainer.compute_advantages(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]]), mask)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 2.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.5, 4.0]]))


def test_whitened_advantages_have_mean_0_and_variance_1_over_valid_tokens(make_trainer):
    """T04: and 20 columns of padding change nothing."""
    trainer = make_trainer(PPOTrainer)
    generator = torch.Generator().manual_seed(0)
    values, rewards = torch.randn(2, 4, 5, generator=generator)
    mask = torch.arange(5) < torch.tensor([[1], [2], [4], [5]])
    advantages, returns = trainer.compute_advantages(values, rewards, mask)
    assert advantages[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[mask].var(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert advantages[~mask].eq(0).all()
    assert returns[mask].mean().abs() > 0.01  # returns are what the critic learns, and stay as they are
    nan = torch.full((4, 20), torch.nan)
    wide = [torch.cat([tensor, nan], dim=1) for tensor in (values, rewards)]
    again, _ = trainer.compute_advantages(*wide, torch.cat([mask, torch.zeros(4, 20, dtype=torch.bool)], dim=1))
    torch.testing.assert_close(again[:, :5], advantages)


def test_garbage_in_padding_more_padding_and_another_row_order_change_no_gradient(make_trainer, monkeypatch):
    """T04, S47: property of the whole step, with KL in reward and loss, over ragged rows of which one is unscored."""
    other = load_model("scratch:tiny", model_init_kwargs={"characters": "01=", "seed": 1, "initializer_range": 0.2})
    trainer = make_trainer(
        PPOTrainer,
        **ONE_STEP,
        kl_coef=0.3,
        kl_in_loss=0.2,
        min_completion_length=4,
        max_completion_length=4,
        trainer={"ref_model": other},
    )
    give_head_an_opinion(trainer)
    mask = torch.arange(4) < torch.tensor([1, 2, 3, 4, 4, 2, 1, 3])[:, None]
    scored = torch.ones(8, dtype=torch.bool)
    scored[2] = False
    rollouts = trainer.generate_rollouts().replace(
        completion_mask=mask,
        sampling_logprobs=torch.full(mask.shape, torch.nan),
        rewards=torch.tensor([0.0, 1.0, 0.0, 3.0, -1.0, 0.5, 0.25, 2.0]),
        scored=scored,
    )
    whole = changes(trainer, lambda: trainer.fit(rollouts))
    assert size(whole, "language_model") > 1e-3 and size(whole, "value_model") > 1e-3
    annotate, filler = trainer.policies.annotate, 0.0

    def annotated(given_rollouts, **arguments):
        result = annotate(given_rollouts, **arguments)
        inside = result.completion_mask
        names = ("old_logprobs", "ref_logprobs", "values")
        return result.replace(**{name: torch.where(inside, getattr(result, name), filler) for name in names})

    monkeypatch.setattr(trainer.policies, "annotate", annotated)

    @settings(max_examples=15)
    @given(
        number=st.sampled_from([0.0, 9.0, -1e6, math.nan, math.inf]),
        token=st.integers(0, 10**6),
        extra=st.integers(0, 20),
        order=st.permutations(range(8)),
        budget=st.sampled_from([1, 20, 10_000]),
    )
    def same(number, token, extra, order, budget):
        nonlocal filler
        filler = number
        wide = torch.nn.functional.pad(mask, (0, extra))
        padded = rollouts.replace(
            completion_mask=wide,
            completion_ids=torch.nn.functional.pad(rollouts.completion_ids, (0, extra)).masked_fill(~wide, token),
            sampling_logprobs=torch.full(wide.shape, torch.nan).masked_fill(~wide, number),
        )
        trainer.config.micro_batch_tokens = trainer.policies.micro_batch_tokens = budget
        again = changes(trainer, lambda: trainer.fit(padded.select(order) if extra % 2 else padded))
        for name, change in whole.items():
            torch.testing.assert_close(again[name], change, atol=2e-6, rtol=1e-4)

    same()


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_actor_loss_by_hand(make_trainer):
    """S48: ratio 1.5 or 0.5, range 0.2: the smaller gain of clipped and unclipped."""
    trainer = make_trainer(PPOTrainer, cliprange=0.2)
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], requires_grad=True)
    loss = trainer.actor_loss(ratio, torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0]))
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.2, 1.5, -0.5, 0.8, -2.2]))
    loss.sum().backward()
    assert ratio.grad.tolist() == [0.0, 1.0, -1.0, 0.0, -2.0]


def test_critic_loss_by_hand(make_trainer):
    """S49, W4: half the squared error; a move towards the return counts up to 0.2 and no further."""
    trainer = make_trainer(PPOTrainer, cliprange_value=0.2)
    loss = trainer.critic_loss(torch.tensor([0.1, 0.5, -0.5]), torch.ones(3), torch.zeros(3))
    torch.testing.assert_close(loss, torch.tensor([0.405, 0.32, 1.125]))


def test_a_first_value_loss_is_half_the_squared_return_times_its_weight(make_trainer):
    """S49: a critic that says 0, every return 2: 0.3 * 2^2 / 2."""
    trainer = make_trainer(
        PPOTrainer,
        **{**PLAIN, "lam": 1.0},
        vf_coef=0.3,
        num_epochs=1,
        reward_funcs=lambda completions, **_: [2.0] * len(completions),
    )
    assert trainer.run_step().result()["loss/value"] == pytest.approx(0.6)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.75), (1.0, 1.0), (-1.0, -3.0), (0.0, 0.0)])
def test_explained_variance_by_hand(share, expected, make_trainer, monkeypatch):
    """S49: values are a share of the returns, so that 1 - (1 - share)^2 of their variance is explained."""
    trainer = make_trainer(
        PPOTrainer, **{**PLAIN, "lam": 1.0}, reward_funcs=lambda completions, **_: [float(row) for row in range(8)]
    )
    say(trainer, monkeypatch, lambda rollouts: share * rollouts.rewards[:, None].expand(8, 2).clone())
    assert trainer.run_step().result()["explained_variance"] == pytest.approx(expected, abs=1e-5)


def test_a_critic_learns_what_a_prompt_is_worth(make_trainer):
    """S36, S49, S50: the reward is the prompt's first character; the value loss falls, explained variance rises."""
    trainer = make_trainer(
        PPOTrainer,
        **{**PLAIN, "lam": 1.0},
        value_model="separate",
        value_learning_rate=3e-3,
        prompts_per_step=4,
        reward_funcs=lambda prompts, **_: [float(prompt[0]) for prompt in prompts],
    )
    rows = [trainer.run_step().result() for _ in range(15)]
    assert rows[-1]["loss/value"] < 0.1 * rows[0]["loss/value"]
    assert rows[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6) and rows[-1]["explained_variance"] > 0.8


# ---- remedies --------------------------------------------------------------------------------------------------------


def test_the_critic_has_a_learning_rate_of_its_own(make_trainer):
    """S50, W6: half of it moves the critic half as far, and the policy as far as before."""
    moved = {}
    for rate in (0.5, 0.25):
        trainer = make_trainer(PPOTrainer, **ONE_STEP, value_model="separate", value_learning_rate=rate)
        moved[rate] = changes(trainer, trainer.run_step)
    assert size(moved[0.5], "value_model") == pytest.approx(2 * size(moved[0.25], "value_model"), rel=1e-3) != 0
    assert size(moved[0.5], "language_model") == pytest.approx(size(moved[0.25], "language_model"), rel=1e-5) != 0


def test_without_one_the_critic_learns_at_the_policys_rate(make_trainer):
    """S50, W6: no hard-wired ratio."""
    row = make_trainer(PPOTrainer, learning_rate=2e-4).run_step().result()
    assert row["value_learning_rate"] == row["learning_rate"]


def larger_llama():
    options = {"characters": "01=", "hidden_size": 128, "num_hidden_layers": 3}
    return load_model("scratch:tiny", head="sequence_classification", model_init_kwargs=options)


def wide_gpt2():
    sizes = {"vocab_size": 7, "n_embd": 96, "n_layer": 1, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, num_labels=1, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2ForSequenceClassification(config)


@pytest.mark.parametrize("make_critic", [larger_llama, wide_gpt2])
def test_any_sequence_classification_model_may_be_the_critic(make_critic, make_trainer, tmp_path):
    """S41, S50: larger capacity. Its values are its own words about each prefix; it learns, and is saved."""
    critic = make_critic()
    trainer = make_trainer(
        PPOTrainer, max_steps=2, min_completion_length=1, max_completion_length=3, trainer={"value_model": critic}
    )
    rollouts = trainer.policies.annotate(trainer.generate_rollouts(), old=True)
    for row in range(len(rollouts)):
        values = rollouts.values[row][rollouts.completion_mask[row]]
        torch.testing.assert_close(values, values_alone(critic.eval(), rollouts, row), atol=1e-5, rtol=0)
    before = weights(trainer, "value_model")
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer, "value_model").items())
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "value_model")
    assert type(saved) is type(critic)
    assert torch.equal(saved.score.weight, critic.score.weight)


def test_a_critic_may_be_named_by_its_folder(make_trainer, tmp_path):
    """S50."""
    larger_llama().save_pretrained(tmp_path / "critic")
    policy = load_model("scratch:tiny", model_init_kwargs={"characters": "01="})
    tokenizer = {"processing_class": make_trainer(PPOTrainer).processing_class}
    trainer = make_trainer(PPOTrainer, model=policy, value_model=str(tmp_path / "critic"), trainer=tokenizer)
    assert trainer.policies.module.value_model.classifier.config.hidden_size == 128
    assert math.isfinite(trainer.run_step().result()["loss/value"])


class CriticOnly(PPOTrainer):
    """The actor's loss says nothing, so that whatever moves is moved by the critic's."""

    def actor_loss(self, ratio, advantages):
        return 0 * ratio


@pytest.mark.parametrize("detach", [True, False])
def test_a_detached_head_leaves_no_value_gradient_in_the_backbone(detach, make_trainer):
    """S50."""
    trainer = make_trainer(CriticOnly, **ONE_STEP, kl_coef=0.0, detach_value_head=detach)
    give_head_an_opinion(trainer)
    changed = changes(trainer, trainer.run_step)
    assert size(changed, "value_model") > 1e-3
    assert (size(changed, "language_model") == 0) == detach


def test_a_detached_head_of_a_critic_with_a_backbone_of_its_own_is_refused():
    """S50."""
    with pytest.raises(ConfigError, match="detach_value_head"):
        PPOConfig(detach_value_head=True, value_model="separate")


class Weights(TrainerCallback):
    """Keeps a copy of all weights after every step."""

    def __init__(self):
        self.trainer, self.after = None, []

    def on_step_end(self, args, state, control, **_):
        self.after.append(weights(self.trainer))


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_the_critic_alone_learns_in_its_warm_up_steps(value_model, make_trainer):
    """S50: two steps, of which the policy has none; from the third on both learn."""
    watch = Weights()
    trainer = make_trainer(
        PPOTrainer, value_model=value_model, value_warmup_steps=2, max_steps=3, trainer={"callbacks": [watch]}
    )
    watch.trainer, steps = trainer, [weights(trainer)]
    trainer.train()
    steps += watch.after
    for number, (before, after) in enumerate(pairwise(steps), start=1):
        moved = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == ({"value_model"} if number <= 2 else {"value_model", "language_model"}), number
    first = trainer.run.state.log_history[1]
    assert first["kl"] == pytest.approx(0, abs=1e-6) and first["loss/value"] > 0


def rates(trainer):
    """Learning rates of policy and critic in every step."""
    trainer.train()
    history = trainer.run.state.log_history
    return [[row[name] for row in history] for name in ("learning_rate", "value_learning_rate")]


def test_the_critics_learning_rate_warms_up_by_itself(make_trainer):
    """S50, S26: four of five steps for the critic, none for the policy; both then fall to 0 at a sixth."""
    settings = {"learning_rate": 6e-3, "value_learning_rate": 8e-3, "num_epochs": 1, "max_steps": 5}
    policy, critic = rates(make_trainer(PPOTrainer, **settings, value_lr_warmup_steps=4))
    assert policy == pytest.approx([5e-3, 4e-3, 3e-3, 2e-3, 1e-3])
    assert critic == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 4e-3])


def test_the_critics_rate_warms_up_with_the_policys_unless_told_otherwise(make_trainer):
    """S50, S26: half of four steps, written as a fraction; both then fall to 0 at a fifth."""
    settings = {"learning_rate": 3e-3, "value_learning_rate": 6e-3, "num_epochs": 1, "max_steps": 4}
    policy, critic = rates(make_trainer(PPOTrainer, **settings, warmup_steps=0.5))
    assert policy == pytest.approx([1.5e-3, 3e-3, 2e-3, 1e-3])
    assert critic == pytest.approx([2 * rate for rate in policy])


def test_a_constant_rate_is_reached_by_its_warm_up(make_trainer):
    """S26."""
    settings = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "max_steps": 3, "warmup_steps": 2}
    policy, critic = rates(make_trainer(PPOTrainer, **settings, value_learning_rate=8e-3))
    assert policy == pytest.approx([5e-4, 1e-3, 1e-3])
    assert critic == pytest.approx([4e-3, 8e-3, 8e-3])


@pytest.mark.parametrize("value_model", ["shared", "separate"])
def test_the_critics_gradient_is_clipped_by_itself(value_model, make_trainer):
    """S50: to a norm of 1e-3, with the norm before clipping logged; the policy moves as far as without."""
    moved, rows = {}, {}
    for limit in (None, 1e-3):
        trainer = make_trainer(PPOTrainer, **ONE_STEP, value_model=value_model, value_max_grad_norm=limit)
        before = weights(trainer)
        rows[limit] = trainer.run_step().result()
        moved[limit] = {name: value - before[name] for name, value in weights(trainer).items()}
    assert size(moved[1e-3], "value_model") == pytest.approx(1e-3, rel=1e-3)
    assert size(moved[None], "value_model") > 2e-3
    assert rows[1e-3]["value_grad_norm"] == pytest.approx(size(moved[None], "value_model"), rel=1e-3)
    assert size(moved[1e-3], "language_model") == pytest.approx(size(moved[None], "language_model"), rel=1e-5)


def test_one_limit_on_the_gradient_holds_for_policy_and_critic_together(make_trainer):
    """S50: without a limit of its own, the critic's gradient is clipped with the policy's."""
    trainer = make_trainer(PPOTrainer, **{**ONE_STEP, "max_grad_norm": 1e-2}, value_model="separate")
    changed = changes(trainer, trainer.run_step)
    assert size(changed, "") == pytest.approx(1e-2, rel=1e-3)
    assert size(changed, "value_model") > 1e-4


def test_a_saved_critic_with_an_adapter_of_its_own_loads_and_says_what_it_said(make_trainer, tmp_path):
    """S36, S50: `value_model/` is a whole sequence-classification model, the adapter merged into it."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(PPOTrainer, value_model="separate", learning_rate=1e-2, trainer={"peft_config": adapter})
    trainer.train()
    rollouts = trainer.policies.annotate(trainer.generate_rollouts(), old=True)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "value_model").eval()
    assert rollouts.values.std() > 1e-3
    for row in range(len(rollouts)):
        torch.testing.assert_close(rollouts.values[row], values_alone(saved, rollouts, row), atol=1e-5, rtol=0)


def test_a_critic_from_a_folder_does_not_get_the_options_of_a_policy_made_on_the_spot(make_trainer, tmp_path):
    """S50: `model_init_kwargs` here says of which characters scratch:tiny is made."""
    make_trainer(PPOTrainer, output_dir=str(tmp_path / "first")).train()
    again = make_trainer(PPOTrainer, value_model=str(tmp_path / "first" / "value_model"))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first" / "value_model")
    torch.testing.assert_close(again.policies.module.value_model.classifier.score.weight, saved.score.weight)
