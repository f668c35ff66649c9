"""Loading: dtype, safetensors only, saving again, padding tokens and the embedding row that must keep its gradient."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quintain.errors import ConfigError
from quintain.policies.loading import clear_padding_idx, ensure_pad_token, load_model, load_tokenizer
from quintain.policies.scratch import scratch_model, scratch_tokenizer

IDS = torch.tensor([[5, 2, 7, 1, 9, 2, 6]])


@pytest.fixture
def folder(tmp_path):
    """A saved model and its tokenizer."""
    scratch_model(hidden_size=16, seed=3).save_pretrained(tmp_path / "model")
    scratch_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def model_with_pad_equal_to_eos() -> LlamaForCausalLM:
    """As SmolLM2: the embedding is made with the end-of-sequence id as its padding index, and weights are tied."""
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=2, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gradient_of_row_2(model: LlamaForCausalLM) -> float:
    model(IDS, labels=IDS).loss.backward()
    return float(model.get_input_embeddings().weight.grad[2].abs().max())


def test_the_embedding_row_of_the_padding_id_gets_its_gradient():
    """Without clearing, the row of a padding id that is also EOS would silently get none."""
    assert gradient_of_row_2(model_with_pad_equal_to_eos()) == 0.0
    assert gradient_of_row_2(clear_padding_idx(model_with_pad_equal_to_eos())) > 0.0
    assert gradient_of_row_2(load_model(model_with_pad_equal_to_eos())) > 0.0


def test_clearing_reaches_the_embedding_under_an_adapter():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_with_pad_equal_to_eos(), LoraConfig(target_modules=["embed_tokens"]))
    clear_padding_idx(model)
    assert all(m.padding_idx is None for m in model.modules() if isinstance(m, torch.nn.Embedding))


def test_a_loaded_model_is_returned_as_it_is():
    model = scratch_model(hidden_size=16)
    assert load_model(model) is model


def test_model_init_kwargs_together_with_a_loaded_model_are_refused():
    with pytest.raises(ConfigError, match=r"model_init_kwargs.*revision.*LlamaForCausalLM"):
        load_model(scratch_model(hidden_size=16), model_init_kwargs={"revision": "main"})


def test_weights_are_float32_unless_asked_otherwise(folder, tmp_path):
    half = tmp_path / "half"
    scratch_model(hidden_size=16, dtype=torch.bfloat16).save_pretrained(half)
    assert load_model(str(half)).dtype == torch.float32
    assert load_model(half, dtype="float16").dtype == torch.float16
    assert load_model(half, dtype="float16", model_init_kwargs={"dtype": "bfloat16"}).dtype == torch.bfloat16
    assert load_model(half, model_init_kwargs={"torch_dtype": torch.bfloat16}).dtype == torch.bfloat16


def test_a_loaded_folder_saves_and_loads_with_identical_logits(folder, tmp_path):
    model = load_model(str(folder))
    assert not model.training
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(model(IDS).logits, again(IDS).logits)


def test_pickled_weights_are_refused_unless_asked_for(folder):
    model = load_model(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*use_safetensors: false"):
        load_model(folder)
    unsafe = load_model(folder, model_init_kwargs={"use_safetensors": False})
    assert torch.equal(unsafe(IDS).logits, model(IDS).logits)


def test_a_hub_model_that_cannot_be_had_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'nobody/no-such-model' could not be loaded"):
        load_model("nobody/no-such-model")


def test_a_folder_without_tokenizer_asks_for_one(tmp_path):
    scratch_model(hidden_size=16).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)No tokenizer could be loaded for .*processing_class"):
        load_tokenizer(tmp_path)


def test_code_that_comes_with_a_model_does_not_run_unless_asked(folder):
    (folder / "config.json").write_text(
        '{"model_type": "homemade", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}'
    )
    (folder / "code.py").write_text("raise SystemExit('code ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(folder)


def test_the_tokenizer_is_found_from_folder_and_from_model(folder):
    assert load_tokenizer(folder)("01+").input_ids == scratch_tokenizer()("01+").input_ids
    assert load_tokenizer(load_model(folder)).chat_template == scratch_tokenizer().chat_template


def test_a_model_of_unknown_origin_asks_for_its_tokenizer():
    with pytest.raises(ConfigError, match="processing_class"):
        load_tokenizer(model_with_pad_equal_to_eos())


def test_a_missing_padding_token_becomes_the_end_of_sequence_token(folder):
    """T08 d: such a tokenizer trains normally."""
    bare = PreTrainedTokenizerFast(tokenizer_object=scratch_tokenizer("01").backend_tokenizer, eos_token="<eos>")
    bare.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_a_tokenizer_with_neither_padding_nor_end_is_refused():
    bare = PreTrainedTokenizerFast(tokenizer_object=scratch_tokenizer("01").backend_tokenizer)
    with pytest.raises(ConfigError, match="neither a padding nor an end-of-sequence token"):
        ensure_pad_token(bare)


def test_an_existing_padding_token_is_kept():
    tokenizer = scratch_tokenizer()
    assert ensure_pad_token(tokenizer).pad_token == "<pad>"


def test_reading_gguf_without_the_gguf_package_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        load_model(tmp_path / "weights.gguf")
