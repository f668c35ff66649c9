"""`scratch:tiny`: a small transformer with a character tokenizer, made on the spot from a seed."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from quintain.errors import ConfigError, nearest

Head = Literal["causal_lm", "sequence_classification"]
"""What a model ends in: next-token logits, or one score a sequence."""

PRINTABLE = "".join(chr(code) for code in range(32, 127)) + "\n"
"""The default alphabet: printable ASCII and the newline."""

SPECIAL_TOKENS = PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"

# Built of special tokens and content alone, so that chat prompts work whatever the alphabet is.
CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{{{{ '{BOS}' + message['content'] + '{EOS}' }}}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{{{{ '{BOS}' }}}}{{% endif %}}"
)


def scratch_model(
    *,
    head: Head = "causal_lm",
    characters: str = PRINTABLE,
    hidden_size: int = 64,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    max_position_embeddings: int = 1024,
    initializer_range: float = 0.02,
    seed: int = 0,
    num_labels: int = 1,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """A Llama-style transformer with random weights; about 0.14 million parameters by default.

    The same arguments give the same weights, whatever the state of torch's random generator, which is left untouched.

    Args:
        head: what the model ends in; `num_labels` is read for "sequence_classification" only.
        characters: the alphabet; each character is a token.
        hidden_size: width, a multiple of twice `num_attention_heads`; the feed-forward layers are four times as wide.
        max_position_embeddings: longest sequence, in tokens.
        initializer_range: standard deviation of the initial weights.
    Raises:
        ConfigError: the heads do not divide the width into even parts, or the alphabet is empty.
    """
    if hidden_size % (2 * num_attention_heads):
        raise ConfigError(
            f"hidden_size of scratch:tiny must be a multiple of 2 * num_attention_heads, because rotary "
            f"positions turn pairs: got hidden_size={hidden_size}, num_attention_heads={num_attention_heads}. "
            f"Use hidden_size={2 * num_attention_heads * max(1, hidden_size // (2 * num_attention_heads))}."
        )
    vocabulary = _vocabulary(characters)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        pad_token_id=vocabulary[PAD],
        bos_token_id=vocabulary[BOS],
        eos_token_id=vocabulary[EOS],
        num_labels=num_labels,
        attn_implementation=attn_implementation,
    )
    config.name_or_path = "scratch:tiny"
    config.scratch_characters = characters
    architecture = LlamaForCausalLM if head == "causal_lm" else LlamaForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = architecture(config)
    return model.to(dtype).eval()


def scratch_tokenizer(
    characters: str = PRINTABLE, *, max_position_embeddings: int = 1024, special_tokens_first: bool = True
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character; a character outside the alphabet becomes `<unk>`.

    Nothing is added to a text, and decoding gives back exactly what was encoded. The name of a special token written
    out in a text is that token.

    Args:
        special_tokens_first: give the special tokens the lowest ids, as `scratch_model` does; else the characters.
    Raises:
        ConfigError: the alphabet is empty.
    """
    vocabulary = _vocabulary(characters)
    if not special_tokens_first:
        number = len(vocabulary)
        vocabulary = {token: (index - len(SPECIAL_TOKENS)) % number for token, index in vocabulary.items()}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Without a decoder, tokens are joined with spaces.
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_position_embeddings,
    )


def check_scratch_options(options: dict[str, Any]) -> None:
    """Refuse an option that `scratch_model` does not have, naming the nearest that it has.

    Raises:
        ConfigError: an option is unknown.
    """
    known = [name for name in inspect.signature(scratch_model).parameters if name != "head"]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"scratch:tiny has no option {name!r} (in model_init_kwargs).{nearest(name, known)} "
                f"Known: {', '.join(known)}."
            )


def _vocabulary(characters: str) -> dict[str, int]:
    """Token to id: the four special tokens, then each character once, in the order given."""
    if not isinstance(characters, str) or not characters:
        raise ConfigError(
            f"characters of scratch:tiny must be text with at least one character: got {characters!r}. "
            f'Write model_init_kwargs: {{characters: "01"}}, with the quotes, so that digits stay text.'
        )
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS, *dict.fromkeys(characters)])}
