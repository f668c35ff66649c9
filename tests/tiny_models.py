"""Tiny random models and tokenizers for tests: 2 layers, width 32, 64 tokens, made on the spot from a seed."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 64
PAD, BOS, EOS = 0, 1, 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    # Wide enough that the model has opinions: with the usual 0.02 every token is as likely as the next.
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_GATED: dict[str, Any] = {"intermediate_size": 64, "num_key_value_heads": 2}
_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    # Absolute positions, and dropout 0.1 that sampling and scoring must switch off.
    "gpt2": (GPT2Config, GPT2LMHeadModel, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "llama": (LlamaConfig, LlamaForCausalLM, _GATED),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, _GATED),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**_GATED, "head_dim": 8}),
    # A window of 6 tokens, shorter than most test sequences: alternating layers here, every layer in mistral.
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {**_GATED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {**_GATED, "sliding_window": 6}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"intermediate_size": 64}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {**_GATED, "head_dim": 8}),
    "phi": (PhiConfig, PhiForCausalLM, {"intermediate_size": 64, "resid_pdrop": 0.1}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {**_GATED, "pad_token_id": 0}),
    # Its logits are scaled after the output layer.
    "cohere": (CohereConfig, CohereForCausalLM, {**_GATED, "logit_scale": 0.25}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str = "llama", *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A random model of the family, in training mode as a constructor leaves it; `config` overrides its config fields.

    The global random generator is left as it was.
    """
    config_class, model_class, fields = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config_class(**{**_SIZES, **fields, **config})).train()


def tiny_tokenizer(*, pad_token: str | None = "<pad>", chat_template: bool = False) -> PreTrainedTokenizerFast:
    """64 tokens: `<pad> <bos> <eos>` (0, 1, 2), then single characters, then `ab`, `bc` and `cab`, ids 61 to 63.

    Text becomes one token a character; the longer tokens are only ever sampled, so that text runs across token borders.
    """
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?+-*/=()'\"<>[]_#|\n"[: VOCAB_SIZE - 6]
    tokens = ["<pad>", "<bos>", "<eos>", *characters, "ab", "bc", "cab"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token=pad_token
    )
    if chat_template:
        fast.chat_template = (
            "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}<eos>{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}"
        )
    return fast


def chain_model(successors: dict[int, int]) -> PreTrainedModel:
    """A Llama that always says `successors[token]` after `token`, and repeats tokens that have no successor."""
    model = tiny_model("llama", hidden_size=VOCAB_SIZE)
    chain = {token: successors.get(token, token) for token in range(VOCAB_SIZE)}
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(VOCAB_SIZE))
        head = model.get_output_embeddings().weight.zero_()
        for token, successor in chain.items():
            head[successor, token] = 50.0
    return model
