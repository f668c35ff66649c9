"""What PPO refuses and what it bears: odd returns of a hook, settings that cannot hold, models without weights."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification

from quintain import ConfigError, PPOConfig, PPOTrainer, RewardError
from quintain.advantages.token_rewards import per_token_rewards
from quintain.policies.loading import load_model, load_tokenizer

PLAIN = {"kl_coef": 0.0, "gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
OPTIONS = {"characters": "01="}


def tiny(**options):
    return load_model("scratch:tiny", model_init_kwargs={**OPTIONS, **options})


def tokenizer():
    return load_tokenizer("scratch:tiny", model_init_kwargs=OPTIONS)


# ---- what compute_rewards may return --------------------------------------------------------------------------------


def test_rows_in_a_tuple_are_rows_also_where_batch_and_length_agree():
    """S54, W4: as many tokens as completions; the first row must not be taken for one number a completion."""
    mask, rewards = torch.ones(3, 3, dtype=torch.bool), torch.arange(9.0).reshape(3, 3)
    torch.testing.assert_close(per_token_rewards(rewards, mask), rewards)
    torch.testing.assert_close(per_token_rewards((rewards, -rewards), mask), rewards)
    torch.testing.assert_close(per_token_rewards([rewards, -rewards], mask), rewards)
    torch.testing.assert_close(per_token_rewards((list(rewards), list(-rewards)), mask), rewards)
    with pytest.raises(RewardError, match=r"a tuple of 3: a tensor \[3\].*can be read in two ways"):
        per_token_rewards(rewards.unbind(), mask)
    wide = torch.ones(3, 4, dtype=torch.bool)
    torch.testing.assert_close(per_token_rewards(torch.ones(3, 4).unbind(), wide), torch.ones(3, 4))


def test_a_reward_of_a_valid_token_that_is_not_finite_is_refused_and_one_in_the_padding_is_not(make_trainer):
    """S54, S57: it would be carried into every weight."""

    class Broken(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
            return scores * math.nan

    trainer = make_trainer(Broken)
    before = trainer.policies.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    with pytest.raises(RewardError, match=r"compute_rewards returned nan for row 0, completion token 1"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.policies.state_dict().items())
    padded = torch.tensor([[1.0, math.nan]])
    mask = torch.tensor([[True, False]])
    torch.testing.assert_close(per_token_rewards(padded, mask), torch.tensor([[1.0, 0.0]]))


def test_an_override_that_writes_into_its_arguments_spoils_nothing(make_trainer):
    """S38, S54."""

    class InPlace(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks=None):
            rewards = logprobs
            rewards -= ref_logprobs
            rewards *= -self.kl_coef
            rewards[:, -1] += scores
            return rewards

    make_trainer(InPlace, num_epochs=2).train()  # the first update of a rollout is checked to be on-policy


def test_an_override_finds_a_last_token_in_every_row_also_in_those_left_out(make_trainer):
    """S38, S54, W4: TRL 0.4's own loop looks for the last masked token of each row."""

    class LikeTRL(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
            rewards, non_score_rewards = [], []
            for score, logprob, ref_logprob, mask in zip(scores, logprobs, ref_logprobs, masks):
                non_score = -self.kl_coef * (logprob - ref_logprob)
                non_score_rewards.append(non_score)
                reward = non_score.clone()
                reward[mask.nonzero()[-1]] += score
                rewards.append(reward)
            return torch.stack(rewards), torch.stack(non_score_rewards)

    def some(completions, **_):
        return [None, *(1.0 for _ in completions[1:])]

    settings = {"min_completion_length": 0, "mask_truncated_completions": True}
    make_trainer(LikeTRL, reward_funcs=some, **settings).train()


def test_exact_kl_reaches_an_override_of_the_usual_form(make_trainer):
    """S43, S54: the difference of the two log-probabilities it is given is then the exact KL, never below 0."""
    seen = []

    class Own(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, mask):
            seen.append((logprobs - ref_logprobs)[mask])
            return super().compute_rewards(scores, logprobs, ref_logprobs, mask)

    make_trainer(Own, kl_estimator="exact", max_steps=3, learning_rate=1e-2).train()
    assert bool((seen[-1] > 0).all())
    assert float(seen[0].abs().max()) < 1e-5


def test_the_gradient_of_exact_kl_is_on_the_scale_of_whitened_rewards(make_trainer):
    """S44: rewards a hundred times as large leave whitened advantages as they are, and KL a hundredth of its weight."""

    def direct_weight(size, **whiten):
        trainer = make_trainer(
            PPOTrainer,
            reward_funcs=lambda completions, **_: [size * float(text.startswith("0")) for text in completions],
            kl_estimator="exact",
            kl_coef=0.5,
            **whiten,
        )
        trainer.run_step()
        return trainer.kl_direct_coef

    for whiten in ({}, {"whiten_rewards": True}):
        assert direct_weight(100.0, **whiten) == pytest.approx(direct_weight(1.0, **whiten) / 100, rel=1e-3)


def test_a_critic_loss_of_values_and_returns_alone_is_enough(make_trainer):
    """S37, S49."""

    class Squared(PPOTrainer):
        def critic_loss(self, values, returns):
            return 0.5 * (values - returns) ** 2

    def first_loss(trainer_class):
        trainer = make_trainer(trainer_class, num_epochs=1, cliprange_value=1e9)
        return trainer.run_step().result()["loss/value"]

    assert first_loss(Squared) == pytest.approx(first_loss(PPOTrainer), rel=1e-6)


@pytest.mark.parametrize(
    ("hook", "returned", "message"),
    [
        ("actor_loss", lambda ratio, *_: ratio[:2], r"actor_loss must return the loss of each of the \d+ valid tokens"),
        ("critic_loss", lambda values, *_: values[:, None], r"critic_loss must return .* got a tensor \[\d+, 1\]"),
        ("actor_loss", lambda *_: None, "got NoneType"),
        (
            "compute_advantages",
            lambda values, *_: values,
            r"two tensors \[8, 2\], advantages and returns: got \[8, 2\]",
        ),
        ("compute_advantages", lambda values, *_: (values, values[0]), r"got \[8, 2\], \[2\]"),
    ],
)
def test_a_hook_that_returns_something_else_is_told_what_it_should(hook, returned, message, make_trainer):
    """S37, S53."""
    own = type("Own", (PPOTrainer,), {hook: lambda self, *arguments: returned(*arguments)})
    with pytest.raises(TypeError, match=message):
        make_trainer(own).run_step()


# ---- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["batch", "running"])
def test_dense_rewards_whose_totals_are_equal_keep_their_size(scaling, make_trainer):
    """S50, S56: there is no spread to divide by, and 1e8 would not do for one."""
    trainer = make_trainer(
        PPOTrainer,
        reward_funcs=lambda completions, **_: [[1.0, -1.0]] * len(completions),
        scale_rewards=scaling,
        **PLAIN,
    )
    rollouts = trainer.estimate(trainer.policies.annotate(trainer.score(trainer.generate_rollouts()), old=True))
    torch.testing.assert_close(rollouts.returns, torch.tensor([[0.0, -1.0]]).expand(8, 2))


# ---- settings that cannot hold --------------------------------------------------------------------------------------


def test_a_fraction_of_an_unknown_number_of_steps_is_refused(tiny_settings):
    """S26, S50: without data no end is known, and the warm-up would never end."""
    settings = {**tiny_settings, "max_steps": None, "value_lr_warmup_steps": 0.1}
    with pytest.raises(ConfigError, match=r"max_steps must be set for value_lr_warmup_steps=0.1 \(a fraction\)"):
        PPOTrainer("scratch:tiny", args=PPOConfig(**settings))


@pytest.mark.parametrize("length", [{"max_steps": 2}, {"max_steps": None, "num_train_epochs": 1}])
def test_a_critic_that_warms_up_for_the_whole_run_is_refused(length, make_trainer):
    """S50: four prompts at two a step are two steps."""
    with pytest.raises(ConfigError, match="value_warmup_steps=2 leaves the policy none of the run's 2 training steps"):
        make_trainer(PPOTrainer, **length, value_warmup_steps=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_kl": 6.0}, "target_kl=6.0 is what kl_control='adaptive' steers to, and kl_control is 'fixed'"),
        ({"kl_control": "adaptive", "target_kl": 6.0, "kl_coef": 0.0, "kl_in_loss": 0.1}, "scales kl_coef, which is 0"),
        ({"scale_rewards": "group"}, "scale_rewards='group'"),
        ({"ratio_threshold": 1.0}, r"ratio_threshold must be a number in \(1, inf\)"),
    ],
)
def test_settings_that_nothing_would_honour_are_refused(settings, message):
    """S45, S46, S50, S51."""
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**settings)


def test_settings_of_a_critic_that_is_given_otherwise_are_refused(make_trainer):
    """S25, S50."""
    critic = load_model("scratch:tiny", model_init_kwargs=OPTIONS, head="sequence_classification")
    with pytest.raises(ConfigError, match=r"detach_value_head=True.*value_model was passed"):
        make_trainer(PPOTrainer, detach_value_head=True, trainer={"value_model": critic})
    model = tiny()
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1)
    given = {"processing_class": tokenizer(), "value_model": critic, "optimizers": (optimizer, None)}
    with pytest.raises(ConfigError, match=r"value_learning_rate=0\.001 is not used where an optimizer is given"):
        make_trainer(PPOTrainer, model=model, value_learning_rate=1e-3, trainer=given)


def test_a_loop_of_ones_own_is_not_left_to_learn_nothing(make_trainer):
    """S26, S38: past the end of a falling schedule."""
    trainer = make_trainer(PPOTrainer, max_steps=1)
    trainer.step(["01=", "10="], ["10", "01"], [1.0, 0.0])
    with pytest.raises(ConfigError, match=r"step 2 is past max_steps=1: the learning rate has fallen to 0"):
        trainer.step(["01=", "10="], ["10", "01"], [1.0, 0.0])


def test_a_misspelt_choice_of_value_model_is_not_taken_for_a_models_name():
    """S50."""
    with pytest.raises(ConfigError, match="Did you mean 'separate'"):
        PPOConfig(value_model="seperate")
    assert PPOConfig(value_model="my-org/reward-model").value_model == "my-org/reward-model"


# ---- models ---------------------------------------------------------------------------------------------------------


def test_an_adapter_loaded_for_inference_is_refused(make_trainer, tmp_path):
    """S36: nothing but the value head would learn."""
    get_peft_model(tiny(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
    frozen = PeftModel.from_pretrained(tiny(), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"no weight of the model can be trained.*is_trainable=True"):
        make_trainer(PPOTrainer, model=frozen, trainer={"processing_class": tokenizer()})


def test_an_adapter_that_merging_would_put_into_the_output_layer_too_is_refused(make_trainer):
    """S36: the saved policy would be another one."""
    model = tiny()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    given = {
        "processing_class": tokenizer(),
        "peft_config": LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens", "q_proj"]),
    }
    with pytest.raises(ConfigError, match="input embeddings, which this model shares with its output layer"):
        make_trainer(PPOTrainer, model=model, trainer=given)


def test_the_arguments_of_trls_first_trainer_are_taken_by_name_and_explained_by_place(tiny_settings, reversal):
    """S38."""
    config = PPOConfig(**{**tiny_settings, "model_init_kwargs": None})
    trainer = PPOTrainer(config=config, model=tiny(), tokenizer=tokenizer(), dataset=reversal)
    assert trainer.prompts is not None
    trainer.log_stats({"step": 1, "reward": 0.5}, {"query": []}, [0.5], columns_to_log=["query"])
    with pytest.raises(ConfigError, match="in the order model, reward_funcs, args: got a PPOConfig as model"):
        PPOTrainer(config, tiny())


def test_a_reward_model_that_would_be_trained_as_the_critic_is_refused(make_trainer):
    """S42, S57: its scores would follow the training."""
    judge = load_model("scratch:tiny", model_init_kwargs=OPTIONS, head="sequence_classification")
    given = {"value_model": judge, "reward_model": judge}
    with pytest.raises(ConfigError, match=r"given as value_model is a reward model too.*deepcopy"):
        make_trainer(PPOTrainer, reward_funcs=None, trainer=given)


def test_one_argument_under_two_names_is_refused(tiny_settings, reversal):
    """S38."""
    config = PPOConfig(**tiny_settings)
    with pytest.raises(ConfigError, match="config is the former name of args, and both were given"):
        PPOTrainer("scratch:tiny", args=config, config=config)
    with pytest.raises(ConfigError, match="peft_config must be a PEFT configuration"):
        PPOTrainer("scratch:tiny", args=config, peft_config={"r": 2})


def test_a_manual_loop_saves_its_critic_too(make_trainer, tmp_path):
    """S36, S38."""
    trainer = make_trainer(PPOTrainer)
    trainer.step(["01=", "10="], ["10", "01"], [1.0, 0.0])
    trainer.save_model()
    trainer.save_value_model(tmp_path / "critic")
    score = trainer.policies.module.value_model.score.weight
    for folder in (tmp_path / "run" / "value_model", tmp_path / "critic"):
        saved = AutoModelForSequenceClassification.from_pretrained(folder)
        torch.testing.assert_close(saved.score.weight, score)
        assert saved.config.pad_token_id is not None
        saved(input_ids=torch.tensor([[4, 5], [5, 4]]))  # a batch, which needs to know what padding is
