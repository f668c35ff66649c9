"""Reward models: the score of each text alone, whatever it is batched with (S42)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reward_rollouts import make_rollouts
from tiny_models import BOS, EOS, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from quintain.errors import ConfigError, RewardError
from quintain.rewards import RewardModel, RewardPipeline, resolve_rewards

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.5,
    "num_labels": 1,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForSequenceClassification, {"intermediate_size": 64}),
    "gpt2": (GPT2Config, GPT2ForSequenceClassification, {"resid_pdrop": 0.5, "n_positions": 64}),
    "bert": (BertConfig, BertForSequenceClassification, {"intermediate_size": 64, "hidden_dropout_prob": 0.5}),
    "roberta": (RobertaConfig, RobertaForSequenceClassification, {"intermediate_size": 64}),
}
PROMPTS = ["hello", "a", "what is it?", "b"]
COMPLETIONS = [" world", "b", " a very long answer indeed", ""]


def classifier(family: str = "llama", **config: Any) -> Any:
    config_class, model_class, fields = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(config_class(**{**SIZES, **fields, **config})).train()


def bos_tokenizer(**kwargs: Any) -> Any:
    """A tokenizer that starts every text with `<bos>` unless asked not to."""
    tokenizer = tiny_tokenizer(**kwargs)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def alone(model: Any, token_ids: list[int]) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=torch.tensor([token_ids])).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad_token_id", [None, 0, EOS])
def test_a_batch_scores_each_text_as_the_model_does_alone_without_padding(
    family: str, pad_token_id: int | None
) -> None:
    """Also where the model knows no padding, and where padding is the end-of-sequence token."""
    if family == "roberta" and pad_token_id is None:
        pytest.skip("RoBERTa derives positions from its padding token and cannot be made without one")
    model, tokenizer = classifier(family, pad_token_id=pad_token_id), tiny_tokenizer()
    expected = [
        alone(model, tokenizer(prompt + completion)["input_ids"]) for prompt, completion in zip(PROMPTS, COMPLETIONS)
    ]
    assert len({round(score, 3) for score in expected}) == 4, "four texts, four different scores"
    for batch_size in (1, 3):
        reward = RewardModel(model, tokenizer, batch_size=batch_size)
        model.train()
        scores = reward(PROMPTS, COMPLETIONS)
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert model.config.pad_token_id == pad_token_id


def test_chats_are_written_with_the_tokenizers_own_template() -> None:
    model, tokenizer = classifier(), bos_tokenizer(chat_template=True)
    prompts = [[{"role": "user", "content": text}] for text in ("hi", "good day")]
    completions = [[{"role": "assistant", "content": text}] for text in ("ab", "c")]
    scores = RewardModel(model, tokenizer)(prompts, completions)
    texts = ["u:hi<eos>a:ab<eos>", "u:good day<eos>a:c<eos>"]
    plain = tiny_tokenizer()  # the template has written all special tokens there are
    expected = [alone(model, plain(text)["input_ids"]) for text in texts]
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_plain_text_gets_the_special_tokens_that_the_tokenizer_adds() -> None:
    model = classifier()
    (score,) = RewardModel(model, bos_tokenizer())(["ab"], ["c"])
    assert score == pytest.approx(alone(model, tiny_tokenizer()("<bos>abc")["input_ids"]), abs=1e-5)


def test_a_text_that_ends_like_padding_is_read_to_its_end() -> None:
    """A model without a padding token reads the very last position; id 0 is a token like any other."""
    model, tokenizer = classifier(pad_token_id=None), tiny_tokenizer()
    texts = ["a<pad>", "b", "abc<pad><pad>"]
    scores = RewardModel(model, tokenizer)([""] * 3, texts)
    expected = [alone(model, tokenizer(text)["input_ids"]) for text in texts]
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_forward_builds_no_graph() -> None:
    model, grad_enabled = classifier(), []
    model.register_forward_hook(lambda *_: grad_enabled.append(torch.is_grad_enabled()))
    RewardModel(model, tiny_tokenizer())(["a"], ["b"])
    assert grad_enabled == [False]


def test_chats_without_a_template_are_refused() -> None:
    pipeline = RewardPipeline(classifier(), processing_classes=tiny_tokenizer())
    rollouts = make_rollouts([[{"role": "assistant", "content": "a"}]], prompts=[[{"role": "user", "content": "b"}]])
    with pytest.raises(RewardError, match=r"no chat template.*reward_processing_classes"):
        pipeline.score(rollouts)


def test_a_model_stands_beside_functions_and_keeps_no_graph() -> None:
    model = classifier()
    pipeline = RewardPipeline([model, "repetition"], weights=[2.0, 1.0], processing_classes=[tiny_tokenizer(), None])
    assert pipeline.names == ["LlamaForSequenceClassification", "repetition"]
    output = pipeline.to("cpu").score(make_rollouts(COMPLETIONS, prompts=PROMPTS))
    expected = [2 * score for score in RewardModel(model, tiny_tokenizer())(PROMPTS, COMPLETIONS)]
    torch.testing.assert_close(output.rewards, torch.tensor(expected))
    assert not output.rewards.requires_grad and all(parameter.grad is None for parameter in model.parameters())


def test_an_overlong_text_is_refused_with_its_row() -> None:
    pipeline = RewardPipeline(RewardModel(classifier(), tiny_tokenizer(), max_length=20))
    with pytest.raises(RewardError, match="row 2 has 37 tokens, the limit is 20"):
        pipeline.score(make_rollouts(COMPLETIONS, prompts=PROMPTS))


def test_an_overlong_text_is_cut_on_the_left_and_counted_when_asked_to() -> None:
    model, tokenizer = classifier(), tiny_tokenizer()
    reward = RewardModel(model, tokenizer, max_length=20, overlong="cut_left")
    output = RewardPipeline(reward).score(make_rollouts(COMPLETIONS, prompts=PROMPTS))
    kept = tokenizer(PROMPTS[2] + COMPLETIONS[2])["input_ids"][-20:]
    assert output.rewards[2].item() == pytest.approx(alone(model, kept), abs=1e-5)
    assert output.metrics["rewards/LlamaForSequenceClassification/cut_fraction"] == 0.25


def test_the_limit_is_the_smaller_of_the_tokenizers_and_the_models() -> None:
    tokenizer = tiny_tokenizer()
    assert RewardModel(classifier("gpt2"), tokenizer).max_length == 64
    tokenizer.model_max_length = 30
    assert RewardModel(classifier("gpt2"), tokenizer).max_length == 30


def test_a_saved_model_is_found_by_its_folder_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    model, tokenizer = classifier(), tiny_tokenizer()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    expected = RewardModel(model, tokenizer)(PROMPTS, COMPLETIONS)
    functions, _ = resolve_rewards({"name": str(folder), "kwargs": {"batch_size": 2}})
    for pipeline in (RewardPipeline(functions), RewardPipeline(str(folder))):
        assert pipeline.names == ["judge"]
        output = pipeline.score(make_rollouts(COMPLETIONS, prompts=PROMPTS))
        torch.testing.assert_close(output.rewards, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_language_model_is_not_taken_for_a_reward_model(tmp_path: Path) -> None:
    """It would load with a random head."""
    tiny_model("llama").save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"is not a reward model: its weights lack score\.weight"):
        RewardPipeline(str(tmp_path / "policy"))


def test_a_model_with_several_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_labels=3"):
        RewardModel(classifier(num_labels=3), tiny_tokenizer())


def test_a_model_made_in_memory_needs_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="reward_processing_classes"):
        RewardPipeline(classifier())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size of a reward model must be at least 1"),
        ({"max_length": 0}, "max_length of a reward model must be at least 1"),
        ({"overlong": "cut"}, "overlong must be 'error' or 'cut_left'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardModel(classifier(), tiny_tokenizer(), **settings)
