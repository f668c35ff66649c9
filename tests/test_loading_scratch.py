"""`scratch:tiny`: seeded weights, a tokenizer that gives back what it was given, and both survive saving."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from quintain.errors import ConfigError
from quintain.policies.loading import load_model, load_tokenizer
from quintain.policies.scratch import PRINTABLE, scratch_model, scratch_tokenizer

TOKENIZER = scratch_tokenizer()
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]


@settings(deadline=None)
@given(st.text(alphabet=PRINTABLE, max_size=30))
def test_decoding_gives_back_what_was_encoded(text):
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids) == text
    if not any(token in text for token in TOKENIZER.all_special_tokens):
        assert len(ids) == len(text)


def test_nothing_is_put_around_a_prompt():
    ids = TOKENIZER("a").input_ids
    assert TOKENIZER.convert_ids_to_tokens(ids) == ["a"]


def test_an_unknown_character_becomes_one_unknown_token():
    tokenizer = scratch_tokenizer("01")
    assert tokenizer("0é1").input_ids == [4, tokenizer.unk_token_id, 5]


def test_a_chat_needs_no_character_outside_a_narrow_alphabet():
    tokenizer = scratch_tokenizer("01=")
    chat = [{"role": "user", "content": "01="}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<bos>01=<eos><bos>"
    assert tokenizer(text).input_ids == [1, 4, 5, 6, 2, 1]


def test_model_and_tokenizer_survive_saving_side_by_side(tmp_path):
    model = load_model("scratch:tiny", model_init_kwargs={"characters": "01= ", "seed": 5})
    tokenizer = load_tokenizer("scratch:tiny", model_init_kwargs={"characters": "01= ", "seed": 5})
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = words("01 =", return_tensors="pt").input_ids
    assert ids.tolist() == [[4, 5, 7, 6]]
    assert words.decode(ids[0]) == "01 ="
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert words.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert (words.pad_token_id, words.bos_token_id, words.eos_token_id, words.unk_token_id) == (0, 1, 2, 3)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, second, third = (scratch_model(seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_making_a_model_leaves_the_random_generator_alone():
    before = torch.random.get_rng_state()
    scratch_model()
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_default_is_between_a_tenth_and_a_fifth_of_a_million_parameters():
    assert 100_000 < sum(p.numel() for p in scratch_model().parameters()) < 200_000


def test_a_loaded_scratch_model_knows_its_alphabet():
    model = load_model("scratch:tiny", model_init_kwargs={"characters": "ab", "max_position_embeddings": 32})
    tokenizer = load_tokenizer(model)
    assert tokenizer("ab").input_ids == [4, 5]
    assert len(tokenizer) == model.config.vocab_size == 6
    assert tokenizer.model_max_length == 32


def test_a_scratch_reward_model_scores_sequences_of_different_lengths():
    model = load_model("scratch:tiny", head="sequence_classification")
    batch = TOKENIZER(["a", "abc"], padding=True, return_tensors="pt")
    alone = model(**TOKENIZER(["a"], return_tensors="pt")).logits
    assert model(**batch).logits.shape == (2, 1)
    torch.testing.assert_close(model(**batch).logits[:1], alone)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"caracters": "01"}, "no option 'caracters'.*Did you mean 'characters'"),
        ({"characters": ""}, "at least one character"),
        ({"characters": 10}, "at least one character"),
        ({"hidden_size": 30}, "hidden_size=30, num_attention_heads=4.*hidden_size=24"),
        ({"dtype": "float33"}, "float33"),
    ],
)
def test_a_wrong_option_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        load_model("scratch:tiny", model_init_kwargs=options)
