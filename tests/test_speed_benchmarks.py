"""benchmarks/rollout.py, gpu.py and time_to_reward.py: what they compare is alike, and what they report is so."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quintain.configs.load import load_recipe
from quintain.policies.loading import load_model, load_tokenizer
from quintain.policies.policies import Policies
from quintain.rollout.native import NativeEngine
from quintain.trainers.base import OnlineRLTrainer

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


rollout, gpu, time_to_reward = map(load_script, ("rollout", "gpu", "time_to_reward"))


@pytest.fixture(autouse=True)
def on_the_processor(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def always(model, token):
    """Let the model say this token, whatever it reads."""
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[token, 0] = 10.0


# ---- rollout.py ---------------------------------------------------------------------------------------------------


def rollout_options(*words):
    return rollout.parser().parse_args(["--model", "scratch:tiny", "--prompts", "2", "--group", "3", *words])


def turn(seconds, load=0.0, tokens=2 * 3 * 8):
    return {"seconds": seconds, "load": load, "tokens": tokens}


def side_of(*turns):
    left = iter(turns)
    return lambda tokens: next(left)


@pytest.mark.parametrize("side", ["native_side", "generate_side"])
def test_every_completion_has_exactly_the_tokens_that_are_asked_for(side, monkeypatch):
    """Although a model that always ends at once is sampled."""
    model = load_model("scratch:tiny")
    always(model, model.config.eos_token_id)
    model.generation_config.eos_token_id = model.config.eos_token_id
    monkeypatch.setattr("quintain.policies.loading.load_model", lambda *_, **__: model)
    take_turn = getattr(rollout, side)(rollout_options(), [[4], [4, 4]])
    taken = take_turn(8)
    assert taken["tokens"] == 2 * 3 * 8 and taken["seconds"] > 0


def test_prompts_are_cut_at_a_word_to_at_most_a_hundred_tokens():
    prompts = rollout.prompt_ids(rollout_options())
    assert all(80 < len(ids) <= rollout.PROMPT_TOKENS for ids in prompts) and prompts[0] != prompts[1]


def test_sides_take_turns_and_their_first_turns_do_not_count():
    order = []

    def side(name):
        return lambda tokens: order.append(name) or turn(len(order))

    rounds = rollout.take_pairs([side("native"), side("generate")], 8, rollout_options("--pairs", "2"))
    assert order == ["native", "generate"] * 3
    assert [[taken["seconds"] for taken in turns] for turns in rounds] == [[3, 4], [5, 6]]


def test_disturbed_turns_are_measured_again_and_the_least_disturbed_are_kept():
    side = side_of(turn(0), turn(1, 0.3), turn(2, 0.9), turn(3, 0.2), turn(4, 0.5), turn(5))
    rounds = rollout.take_pairs([side], 8, rollout_options("--pairs", "2"))
    assert [turns[0]["seconds"] for turns in rounds] == [1, 3]


def test_another_number_of_tokens_cannot_be_compared():
    with pytest.raises(SystemExit, match="sampled 47 tokens, and 48 are wanted"):
        rollout.take_pairs([side_of(turn(0), turn(1, tokens=47))], 8, rollout_options())


def test_rates_are_of_the_median_and_ratios_of_pairs():
    """48 tokens in a median of 3 s; pairs 2/4, 4/4 and 3/12."""
    pairs = [[turn(2.0), turn(4.0)], [turn(4.0), turn(4.0)], [turn(3.0), turn(12.0, 0.2)]]
    case = rollout.summary(8, pairs, ["native", "generate"], rollout_options())
    assert case["sides"]["native"]["tokens_per_second"] == 16 and case["sides"]["native"]["ratio"] == 1
    assert case["sides"]["generate"]["ratio"] == 0.5 and case["sides"]["generate"]["ratio_spread"] == [0.25, 1.0]
    assert case["disturbed_pairs"] == 1 and case["foreign_load"] == 0.2


def test_load_that_is_not_ours_is_a_share_of_all_processors():
    """Two processors for 2 s: 4 s, of which 3.02 were spent, 1.5 by this process, and a tick each is not counted."""
    assert rollout.foreign_load(2.0, 1.5, 3.02, 2) == pytest.approx(1.5 / 4)


def test_greedy_tokens_of_the_engine_are_those_of_generate():
    prompts = [[5, 6, 7], [9] * 12]
    assert rollout.compare_greedy(rollout_options(), prompts, 12) == {
        "tokens": 12,
        "completions": 6,
        "equal": 6,
        "first": None,
        "gap": None,
    }


def test_a_wrong_greedy_token_is_found_and_its_logits_are_told(monkeypatch):
    generate = NativeEngine.generate

    def with_an_error(*arguments):
        samples = generate(*arguments)
        samples.completion_ids[4, 7] = (samples.completion_ids[4, 7] + 1) % 90
        return samples

    monkeypatch.setattr(NativeEngine, "generate", with_an_error)
    found = rollout.compare_greedy(rollout_options(), [[5, 6, 7], [9] * 12], 12)
    assert (found["equal"], found["first"]) == (5, 7) and found["gap"] > 1e-3


def test_rollout_reports_both_sides(tmp_path, capsys):
    words = "--model scratch:tiny --prompts 2 --group 3 --tokens 4,8 --pairs 1 --threads 1"
    threads = torch.get_num_threads()
    try:
        rollout.main([*words.split(), "--json", str(tmp_path / "out.json")])
    finally:
        torch.set_num_threads(threads)
    facts, printed = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert [case["tokens"] for case in facts["cases"]] == [4, 8]
    assert "| 4 | native |" in printed and "| 8 | generate |" in printed and "vLLM: not run" in printed
    assert "6 of 6 completions of 8 tokens are generate's" in printed


VLLM = """
import types
__version__ = "0.0"
class SamplingParams(types.SimpleNamespace): pass
class LLM:
    def __init__(self, folder, dtype, max_model_len, skip_tokenizer_init):
        import os
        assert os.path.exists(folder + "/config.json") and dtype == "float32" and max_model_len > 8
        self.emptied = False
    def reset_prefix_cache(self): self.emptied = True
    def generate(self, prompts, params, use_tqdm):
        assert self.emptied and params.ignore_eos and params.temperature == 1.0
        self.emptied = False
        print("noise on the standard output")
        item = types.SimpleNamespace(token_ids=[0] * params.max_tokens)
        return [types.SimpleNamespace(outputs=[item] * params.n) for _ in prompts]
"""


def test_vllm_is_a_third_side_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "model").mkdir()
    worker = rollout.VLLM(rollout_options("--vllm-python", sys.executable), [[5], [5, 6]], str(tmp_path / "model"))
    try:
        assert worker.facts == {"vllm": "0.0"}
        assert [worker.take_turn(8)["tokens"] for _ in range(2)] == [48, 48]
    finally:
        worker.close()
    assert worker.process.poll() is not None


def test_a_vllm_that_fails_ends_the_measurement(tmp_path, monkeypatch, capfd):
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no such processor')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "model").mkdir()
    with pytest.raises(SystemExit, match="vLLM's process ended with status 1"):
        rollout.VLLM(rollout_options("--vllm-python", sys.executable), [[5]], str(tmp_path / "model"))
    assert "no such processor" in capfd.readouterr().err


# ---- gpu.py -------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_script_stops_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "run_checks", lambda *_: pytest.fail("something was run"))
    assert gpu.main(["--json", str(tmp_path / "never.json")]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err and not (tmp_path / "never.json").exists()


def test_sides_that_cannot_run_are_left_out_with_the_reason(monkeypatch):
    found = {"trl": True, "vllm": None}
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: found[name])
    assert gpu.choose_sides(["grpo", "trl", "trl-vllm"], "cuda") == (
        ["grpo", "trl"],
        {"trl-vllm": "vllm not installed"},
    )
    found["vllm"] = True
    assert gpu.choose_sides(["trl-vllm"], "cuda") == (["trl-vllm"], {})
    assert gpu.choose_sides(["trl-vllm"], "cpu") == ([], {"trl-vllm": "only on a GPU"})
    with pytest.raises(SystemExit, match="unknown side 'dpo'"):
        gpu.choose_sides(["dpo"], "cuda")


def test_the_clock_is_read_only_when_the_device_is_done(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    meter = gpu.Meter("cuda")
    part = argparse.Namespace(work=lambda: order.append("work"))
    meter.time(part, "work", "forward")
    order.clear()
    meter.start()
    part.work()
    assert order == ["wait", "wait", "work", "wait"]
    taken = meter.stop()
    assert taken["phases"]["forward"] > 0 and sum(taken["phases"].values()) == pytest.approx(taken["seconds"])
    order.clear()
    gpu.Meter("cpu").stop()
    assert order == []


def gpu_case(*words):
    small = "--device cpu --model scratch:tiny --prompts 2 --group 3 --tokens 6"
    return gpu.parser().parse_args([*small.split(), *words])


def test_numbers_of_the_library_pass_every_check():
    checks = gpu.check_numbers(gpu_case())
    names = [check["name"] for check in checks]
    assert names[0] == "greedy, float32: 6 of 6 completions of 6 tokens equal"
    assert names[1:] == [f"{n}, {d}" for d in ("float32", "bfloat16") for n in ("engine", "trainer", "sharing")]
    assert all(check["passed"] for check in checks)


@pytest.mark.parametrize(
    "owner, name, field, check",
    [
        (Policies, "online", "logprobs", "trainer"),
        (OnlineRLTrainer, "generate_rollouts", "sampling_logprobs", "engine"),
    ],
)
def test_a_wrong_log_probability_fails_the_check_that_reads_it(monkeypatch, owner, name, field, check):
    original = getattr(owner, name)

    def off(*arguments):
        result = original(*arguments)
        return replace(result, **{field: getattr(result, field) + 0.05})

    monkeypatch.setattr(owner, name, off)
    failed = [found["name"] for found in gpu.check_numbers(gpu_case()) if not found["passed"]]
    assert failed == [f"{check}, float32", f"{check}, bfloat16"]


def test_a_wrong_shared_layout_fails_its_check(monkeypatch):
    original = Policies.online

    def off(policies, rollouts):
        result = original(policies, rollouts)
        return replace(result, logprobs=result.logprobs + 0.05) if policies.module.shares_prompts else result

    monkeypatch.setattr(Policies, "online", off)
    failed = {check["name"].partition(",")[0] for check in gpu.check_numbers(gpu_case()) if not check["passed"]}
    assert failed == {"sharing", "trainer"}


def test_a_wrong_greedy_token_fails_its_check(monkeypatch):
    generate = NativeEngine.generate

    def with_an_error(*arguments):
        samples = generate(*arguments)
        samples.completion_ids[4, 2] = (samples.completion_ids[4, 2] + 1) % 90
        return samples

    monkeypatch.setattr(NativeEngine, "generate", with_an_error)
    check = gpu.check_greedy(gpu_case(), load_model("scratch:tiny"), [[5, 6, 7], [9] * 12])
    assert "5 of 6" in check["name"] and not check["passed"]


def test_bfloat16_is_judged_beside_the_rounding_of_a_plain_pass():
    rounding = torch.full((2, 3), 0.01)
    assert gpu.judged("a", torch.full((2, 3), 0.0209), rounding, "bfloat16")["passed"]
    assert not gpu.judged("a", torch.full((2, 3), -0.0211), rounding, "bfloat16")["passed"]
    assert not gpu.judged("a", torch.tensor([[0.0, 1.1e-3]]), rounding, "float32")["passed"]


def gpu_results(rounds, **others):
    facts = {"versions": {"torch": "2.13"}, "gpu": "a GPU", "cuda": "13.0"}
    names = dict.fromkeys(name for taken in rounds for name in taken)
    common = {"command": "python benchmarks/gpu.py", "options": vars(gpu_case("--rounds", "2")), "checks": []}
    return {
        **common,
        "sides": dict.fromkeys(names, facts),
        "failed": {},
        "left_out": {},
        "rounds": rounds,
        **others,
    }


def gpu_step(seconds, allocated=1.0):
    phases = dict.fromkeys(gpu.PHASES, seconds / 5)
    return {"seconds": seconds, "phases": phases, "allocated_gb": allocated, "reserved_gb": 2.0, "tokens": 36}


def test_ratios_on_the_gpu_are_of_the_same_round():
    """1/4 and 4/2: the median is 1.125; the failed side of the second round leaves one ratio."""
    rounds = [
        {"grpo": gpu_step(1.0, 1.5), "trl": gpu_step(4.0), "trl-vllm": gpu_step(2.0)},
        {"grpo": gpu_step(4.0), "trl": gpu_step(2.0)},
    ]
    text = gpu.report(gpu_results(rounds, failed={"trl-vllm": "its process ended"}))
    row = next(line for line in text.splitlines() if line.startswith("| grpo"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:7] == ["2.500 (1.000 to 4.000)", "14", "1.12 (0.25 to 2.00)", "0.50", "1.50", "2.00"]
    assert "failed: trl-vllm: its process ended." in text and "a GPU" in text and "CUDA 13.0" in text
    assert "The time was up" not in text and "after 1 rounds of 2" in gpu.report(gpu_results(rounds[:1]))


class Process:
    """A side whose answers are known; None: it fails."""

    def __init__(self, *answers):
        self.answers, self.closed = iter(answers), False

    def tell(self, line):
        assert line == "step"

    def answer(self, deadline):
        found = next(self.answers)
        if found is None:
            raise gpu.Failed("gone")
        return found

    def close(self):
        self.closed = True


def test_a_side_that_fails_or_samples_too_little_leaves_the_round_to_the_others():
    results = {"options": vars(gpu_case()), "failed": {}}
    parts = {
        "grpo": Process(gpu_step(1.0)),
        "tpo": Process(None),
        "trl": Process({**gpu_step(1.0), "tokens": 35}),
    }
    workers = dict(parts)
    steps = gpu.take_round(workers, ["grpo", "tpo", "trl"], results, 0.0)
    assert list(steps) == list(workers) == ["grpo"]
    assert results["failed"] == {"tpo": "gone", "trl": "it sampled 35 tokens, and 36 are wanted"}
    assert parts["tpo"].closed and parts["trl"].closed and not parts["grpo"].closed


def test_a_process_that_does_not_answer_in_time_has_failed():
    worker = gpu.Worker.__new__(gpu.Worker)
    worker.process = gpu.subprocess.Popen(["sleep", "60"], stdout=gpu.subprocess.PIPE, start_new_session=True)
    with pytest.raises(gpu.Failed, match="the time was up"):
        worker.answer(gpu.time.monotonic() + 0.05)
    worker.close()
    assert worker.process.poll() is not None


@pytest.mark.slow
def test_the_whole_gpu_script_runs_on_a_cpu(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    sides = "grpo,tpo,ppo,trl" if importlib.util.find_spec("trl") else "grpo,tpo,ppo"
    words = f"--device cpu --model scratch:tiny --prompts 2 --group 4 --tokens 8 --rounds 1 --sides {sides}"
    assert gpu.main([*words.split(), "--json", str(file)]) == 0
    results, printed = json.loads(file.read_text()), capsys.readouterr().out
    (taken,) = results["rounds"]
    assert sorted(taken) == sorted(sides.split(",")) and all(step["tokens"] == 64 for step in taken.values())
    for step in taken.values():
        assert min(step["phases"].values()) > 0
    assert len(results["checks"]) == 7 and "| ppo |" in printed


# ---- time_to_reward.py --------------------------------------------------------------------------------------------

TASK = "builtin:arithmetic?level=1&digits=1&size=20&test=6"


def ttr_options(*words):
    small = f"--model scratch:tiny --dataset {TASK} --prompts 2 --group 4 --tokens 3 --minutes 0.01 --eval-seconds 0.2"
    return time_to_reward.parser().parse_args([*small.split(), *words])


def ttr_case(side="grpo", **others):
    (case,) = time_to_reward.plan(ttr_options("--sides", side, "--seeds", "3"))
    return argparse.Namespace(**{**case, **others})


def test_the_defaults_are_the_settings_of_the_recipe():
    options, recipe = time_to_reward.parser().parse_args([]), load_recipe("arithmetic")
    config = recipe.config
    assert (options.model, options.learning_rate, options.temperature) == (
        recipe.model,
        config.learning_rate,
        config.temperature,
    )
    assert (options.prompts, options.group, options.tokens) == (
        config.prompts_per_step,
        config.num_generations,
        config.max_completion_length,
    )
    assert options.dataset.startswith(recipe.dataset) and recipe.rewards == "numeric_match"


def test_every_seed_begins_with_another_side_and_fields_go_to_theirs():
    words = ["--sides", "grpo,tpo-averaged,trl", "--seeds", "0,1", "--fields", "tpo-averaged:group_logits=averaged"]
    cases = time_to_reward.plan(ttr_options(*words))
    assert [(case["side"], case["seed"]) for case in cases] == [
        ("grpo", 0),
        ("tpo-averaged", 0),
        ("trl", 0),
        ("tpo-averaged", 1),
        ("trl", 1),
        ("grpo", 1),
    ]
    for case in cases:
        assert case["fields"] == ({"group_logits": "averaged"} if case["side"] == "tpo-averaged" else {})


@pytest.mark.parametrize(
    "words, said",
    [
        (["--sides", "grpo,dpo"], "unknown side 'dpo'"),
        (["--fields", "grpo:beta"], "takes SIDE:FIELD=VALUE"),
        (["--fields", "rloo:beta=0"], "names none of the sides"),
        (["--fields", "grpo:epsilon=7"], "epsilon"),
        (["--fields", "grpo:no_such_field=7"], "no_such_field"),
        (["--fields", "trl:beta=0"], "got some for trl"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--prompts", "3"], "multiple of 8"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(words, said, tmp_path):
    small = f"--model scratch:tiny --dataset {TASK} --prompts 2 --group 4 --output_dir {tmp_path / 'none'}".split()
    with pytest.raises(SystemExit, match=said):
        time_to_reward.main([*small, *words])
    assert not (tmp_path / "none").exists()


def test_the_clock_stands_still_during_an_evaluation(monkeypatch):
    """A step takes 4 s, an evaluation 100; the run has 12 s and is evaluated every 6: after 8 s and at the end."""
    now, rows = [0.0], []
    monkeypatch.setattr(time_to_reward, "times", lambda: (now[0], now[0] / 2, now[0]))

    def judge():
        now[0] += 100
        return 0.25

    case = argparse.Namespace(minutes=0.2, eval_seconds=6.0, prompts=2, group=4)
    clock, over = time_to_reward.Clock(case, judge, rows.append), False
    while not over:
        now[0] += 4
        over = clock.step_done()
    assert [row["seconds"] for row in rows] == [0, 8, 12]
    assert [row["steps"] for row in rows] == [0, 2, 3] and rows[-1]["completions"] == 24
    assert rows[-1]["load"] == pytest.approx(0.5 / (time_to_reward.os.cpu_count() or 1))


def test_the_judge_reads_the_weights_and_touches_nothing(tmp_path):
    model = load_model("scratch:tiny")
    judge = time_to_reward.make_judge(ttr_case(greedy=True), str(tmp_path))
    assert judge(model) == judge(model)
    kinds = {type(module) for module in model.modules()}
    assert kinds == {type(module) for module in load_model("scratch:tiny").modules()}
    assert model.config._attn_implementation == load_model("scratch:tiny").config._attn_implementation


def test_the_judge_s_accuracy_is_the_share_of_right_answers(tmp_path, monkeypatch):
    """All held-out answers are 5, and the model always writes 5; then it always writes 6."""
    rows = [{"prompt": f"{number} + {5 - number} = ", "answer": "5"} for number in range(4)]
    (tmp_path / "fives.py").write_text(
        f"from datasets import Dataset\n\ndef make():\n    return {{'test': Dataset.from_list({rows!r})}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = time_to_reward.make_judge(ttr_case(dataset="fives:make", greedy=True, tokens=1), str(tmp_path))
    model = load_model("scratch:tiny")
    five, six = load_tokenizer("scratch:tiny")("56")["input_ids"]
    always(model, five)
    assert judge(model) == 1.0
    always(model, six)
    assert judge(model) == 0.0


ROWS = [
    {"seconds": 0.0, "steps": 0, "completions": 0, "accuracy": 0.1, "load": 0.0},
    {"seconds": 40.0, "steps": 2, "completions": 16, "accuracy": 0.3, "load": 0.0},
    {"seconds": 130.0, "steps": 7, "completions": 56, "accuracy": 0.6, "load": 0.1},
]


def test_accuracy_at_a_moment_lies_between_its_evaluations():
    assert time_to_reward.accuracy_at(ROWS, 0.0) == 0.1
    assert time_to_reward.accuracy_at(ROWS, 20.0) == pytest.approx(0.2)
    assert time_to_reward.accuracy_at(ROWS, 85.0) == pytest.approx(0.45)
    assert time_to_reward.accuracy_at(ROWS, 999.0) == 0.6


def test_a_threshold_is_reached_at_the_first_evaluation_that_shows_it():
    assert time_to_reward.seconds_to(ROWS, 0.3) == 40
    assert time_to_reward.seconds_to(ROWS, 0.31) == 130
    assert time_to_reward.seconds_to(ROWS, 0.61) is None


def test_the_table_holds_means_over_seeds_and_every_seed_s_seconds(tmp_path):
    better = [{**row, "accuracy": row["accuracy"] + 0.2, "load": 0.0} for row in ROWS]
    runs = [{"side": "trl", "seed": 0, "rows": ROWS}, {"side": "trl", "seed": 1, "rows": better}]
    facts = {"command": "c", "minutes": 2.0, "thresholds": [0.5, 0.7], "versions": {"torch": "2"}, "processors": 2}
    time_to_reward.write({**facts, "runs": runs}, tmp_path)
    text = (tmp_path / "table.md").read_text()
    cells = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert cells[:3] == ["trl", "2", "0.200 (0.100 to 0.300)"]
    assert cells[-4:] == ["7 (7 to 7)", "56 (56 to 56)", "130, 40", "not reached, 130"]
    assert "warning: trl, seed 0: other processes took 10%" in text and "seed 1:" not in text
    assert (tmp_path / "accuracy.png").stat().st_size > 1000 and json.loads((tmp_path / "results.json").read_text())


@pytest.mark.parametrize("side", ["grpo", "tpo", "trl"])
def test_a_run_trains_for_its_minutes_and_writes_nothing(side, tmp_path, monkeypatch):
    if side == "trl":
        pytest.importorskip("trl")
    monkeypatch.setattr("quintain.rewards.functions.numeric_match", lambda: gpu.reward)  # no sum is right here
    case, rows = ttr_case(side), []
    folder = tmp_path / "run"
    folder.mkdir()
    weights = []

    def judge(model):
        weights.append(model.model.layers[0].mlp.up_proj.weight.detach().clone())
        return 0.5

    train = time_to_reward.train_trl if side == "trl" else time_to_reward.train_ours
    train(case, str(folder), judge, rows.append)
    assert rows[0]["seconds"] == rows[0]["steps"] == 0 and rows[-1]["seconds"] >= 0.6
    assert rows[-1]["completions"] == 8 * rows[-1]["steps"] > 0 and len(rows) >= 3
    assert not list(folder.rglob("*"))
    assert len(weights) == len(rows) and not torch.equal(weights[0], weights[-1])


@pytest.mark.slow
def test_the_whole_comparison_of_times(tmp_path, capsys):
    sides = "tpo,trl" if importlib.util.find_spec("trl") else "tpo"
    small = f"--model scratch:tiny --dataset {TASK} --prompts 2 --group 4 --tokens 3 --minutes 0.01 --eval-seconds 0.3"
    time_to_reward.main([*small.split(), "--sides", sides, "--seeds", "0", "--output_dir", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [made["side"] for made in results["runs"]] == sides.split(",")
    starts = {made["rows"][0]["accuracy"] for made in results["runs"]}
    assert len(starts) == 1, "the judge sees the same weights before the first step"
    assert "| tpo | 1 |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_fails_ends_the_comparison(tmp_path, capfd):
    words = ["--model", "./nowhere", "--sides", "grpo", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="grpo: its process ended with status 1"):
        time_to_reward.main(words)
    assert "nowhere" in capfd.readouterr().err
