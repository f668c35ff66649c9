"""Token reversal with one reward at the end, as in the paper: prompts, network, tokenizer, reward."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import IterableDataset
from torch import nn
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from quintain.policies.scratch import scratch_tokenizer

SYMBOLS = "01"
"""The vocabulary of prompts, of answers, and of the network: it can write nothing else."""
WIDTH, FEED_FORWARD, HEADS, LAYERS = 64, 256, 2, 2


def reversal_prompts(length: int, number: int, seed: int) -> IterableDataset:
    """A stream of `number` prompts, each drawn uniformly from all there are, with the reversed text as `answer`."""
    return IterableDataset.from_generator(_draw, gen_kwargs={"length": length, "number": number, "seed": seed})


def _draw(length: int, number: int, seed: int) -> Iterator[dict[str, str]]:
    generator = random.Random(f"reversal {seed}")
    for _ in range(number):
        prompt = "".join(generator.choices(SYMBOLS, k=length))
        yield {"prompt": prompt, "answer": prompt[::-1]}


def exact_reversal(completions: list[str], answer: list[str]) -> list[float]:
    """1 if every token is right, else 0."""
    return [float(text == right) for text, right in zip(completions, answer)]


class NoisyReversal:
    """`exact_reversal` plus a little noise, as a reward has that was computed in low precision.

    Args:
        noise: standard deviation, at least 0.
        seed: of the noise, which depends on nothing else but the step, so that a resumed run sees the same.
    """

    def __init__(self, noise: float, seed: int) -> None:
        self.noise, self.seed = noise, seed

    def __call__(
        self, completions: list[str], answer: list[str], trainer_state: Any, log_metric: Callable[[str, float], None]
    ) -> list[float]:
        generator = random.Random(f"noise {self.seed} {trainer_state.global_step}")
        rewards = exact_reversal(completions, answer)
        log_metric("exact", sum(rewards) / len(rewards))  # the error is counted without the noise
        return [reward + generator.gauss(0, self.noise) for reward in rewards]


def reversal_tokenizer() -> PreTrainedTokenizerFast:
    """One token a symbol. Its special tokens have ids that the network lacks: answers have a fixed length, unpadded."""
    return scratch_tokenizer(SYMBOLS, special_tokens_first=False)


def reversal_network(length: int, seed: int) -> PreTrainedModel:
    """A decoder with learned positions and layer norms before attention and feed-forward, about 0.1 million weights.

    Weights start as in the paper's code, where they are the defaults of its library (flax): matrices normal with
    variance 1 / inputs and cut at two standard deviations, token embeddings with variance 1 / width, positions with
    standard deviation 0.02, biases 0. Two details of theirs are left out: a bias on the output, and a term of 1e-6
    instead of 1e-5 in the layer norms.
    """
    config = OPTConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=2 * length,
        activation_function="gelu_pytorch_tanh",
        do_layer_norm_before=True,
        dropout=0.0,
        layerdrop=0.0,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = OPTForCausalLM(config)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                _lecun_normal(module.weight, module.in_features)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 if "position" in name else 1 / math.sqrt(WIDTH))
    return model.eval()


def _lecun_normal(weight: nn.Parameter, inputs: int) -> None:
    # Cutting a normal at two standard deviations leaves 0.8796 of its spread.
    std = 1 / math.sqrt(inputs) / 0.87962566
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
