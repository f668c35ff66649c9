"""The scripts in benchmarks/: what they compare is comparable, and the numbers in their tables are right."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quintain.rollout.records import rollouts_from_tokens

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
RECIPE = """\
model: scratch:tiny
model_init_kwargs: {characters: "01>"}
dataset: builtin:reversal?length=1&characters=01
rewards: exact_match
max_steps: 3
prompts_per_step: 2
num_generations: 2
min_completion_length: 1
max_completion_length: 1
learning_rate: 1e-3
save_steps: 0
"""


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


compare_recipes, ppo_memory = load_script("compare_recipes"), load_script("ppo_memory")
group_sizes = load_script("group_sizes")
run_one = compare_recipes.run_one


# ---- compare_recipes ----------------------------------------------------------------------------------------------


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The current folder, with two recipes of three steps, own-ppo.yaml and own-grpo.yaml."""
    monkeypatch.chdir(tmp_path)
    for algorithm in ("ppo", "grpo"):
        (tmp_path / f"own-{algorithm}.yaml").write_text(f"algorithm: {algorithm}\n{RECIPE}")
    return tmp_path


@pytest.fixture
def started(monkeypatch):
    """The command lines of the runs that are begun; none of them is."""
    commands = []
    monkeypatch.setattr(compare_recipes, "run_one", lambda job, _: commands.append(compare_recipes.command(job)))
    return commands


def compare(*options):
    return compare_recipes.main(["own-ppo.yaml", "own-grpo.yaml", "--output_dir", "out", *options])


def leave_run(folder, rewards, **metrics):
    """What a finished run with these rewards leaves behind, as far as the comparison reads it."""
    (folder / "model").mkdir(parents=True)
    rows = [
        {"step": step, "reward": reward, **{key: values[step - 1] for key, values in metrics.items()}}
        for step, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def cells_of(table, name, second):
    """The cells of the table's row that begins with these two."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return next(row for row in rows if row[:2] == [name, second])


def test_the_table_holds_means_intervals_and_paired_differences(recipes, started, capsys):
    """Two seeds with last rewards 1 and 3: mean 2, and 12.706 * sqrt(2) / sqrt(2) to either side."""
    critic = {"loss/value": [4, 2, 0], "explained_variance": [None, 0.5, 0.25]}
    leave_run(recipes / "out/own-ppo/seed-0", [0, 2, 1], **critic)
    leave_run(recipes / "out/own-ppo/seed-1", [0, 0, 3], **critic)
    leave_run(recipes / "out/own-grpo/seed-0", [0, 0, 0.5])
    leave_run(recipes / "out/own-grpo/seed-1", [0, 3, 2.5])
    assert compare("--seeds", "0,1", "--edge-steps", "1") == 0
    assert started == []
    table = (recipes / "out/table.md").read_text()
    assert capsys.readouterr().out.strip() in table
    assert cells_of(table, "own-ppo", "0")[2:] == ["12", "0", "1", "1", "1.12", "4", "0", "-", "0.25", "0.5"]
    assert cells_of(table, "own-grpo", "1")[2:] == ["12", "0", "2.5", "1.83", "1.52", *["-"] * 5]
    assert cells_of(table, "**own-ppo**", "mean")[2:6] == ["12", "0 ± 0", "2 ± 12.7", "1 ± 0"]
    assert cells_of(table, "own-ppo - own-grpo", "2")[2:5] == ["0 ± 0", "0.5 ± 0", "0 ± 10.6"]
    results = json.loads((recipes / "out/results.json").read_text())
    assert results["recipes"]["own-ppo"]["mean"]["reward_last"] == {"mean": 2, "half_width": pytest.approx(12.706)}
    assert (recipes / "out/reward.png").stat().st_size and (recipes / "out/comparison.html").stat().st_size


def test_seeds_are_paired_where_both_recipes_have_them(recipes, started, capsys):
    leave_run(recipes / "out/own-ppo/seed-0", [1, 1, 1])
    leave_run(recipes / "out/own-ppo/seed-1", [5, 5, 5])
    leave_run(recipes / "out/own-grpo/seed-1", [2, 2, 2])
    assert compare("--seeds", "0,1") == 1
    printed = capsys.readouterr()
    assert cells_of(printed.out, "own-ppo - own-grpo", "1")[2:] == ["3", "3", "3", "0"]
    assert str(Path("out/own-grpo/seed-0")) in printed.err and "not finished" in printed.err


def test_held_out_rewards_have_columns_and_a_plot_where_a_recipe_evaluates(recipes, started):
    leave_run(recipes / "out/own-ppo/seed-0", [0, 1, 1], eval_reward=[0.9, 0.25, 0.75])
    leave_run(recipes / "out/own-grpo/seed-0", [0, 1, 1], eval_reward=[None, 0.1, 0.2])
    assert compare("--seeds", "0") == 0
    table = (recipes / "out/table.md").read_text()
    assert cells_of(table, "own-ppo", "0")[-2:] == ["0.5", "0.9"]  # the mean of the last two; the best of all
    assert cells_of(table, "own-ppo - own-grpo", "1")[-2:] == ["0.35", "0.7"]
    assert (recipes / "out/eval_reward.png").stat().st_size > 10_000


def test_the_step_to_step_spread_is_the_noise_about_a_trend():
    """Noise of standard deviation s changes by s * root 2 from step to step; a steady rise of 0.01 hardly counts."""
    assert compare_recipes.step_to_step([0.0, 0.2, 0.0, 0.2]) == pytest.approx(0.2 / 2**0.5)
    assert compare_recipes.step_to_step([0.0, 0.01, 0.02, 0.03]) == pytest.approx(0.01 / 2**0.5)
    assert compare_recipes.step_to_step([0.5]) is None


def test_the_best_mean_is_over_neighbours_and_skips_gaps():
    assert compare_recipes.best_mean([9, None, 1, 3, 2], 2) == 2.5
    assert compare_recipes.best_mean([1, 2], 3) is None


def test_a_run_goes_on_from_its_checkpoint_and_starts_where_it_has_none(recipes, started):
    """A run without a saved policy is not finished, whatever its last step."""
    folder = recipes / "out/own-ppo/seed-7"
    leave_run(folder, [1, 1, 1, 1])
    (folder / "model").rmdir()
    (folder / "checkpoints/step-000002").mkdir(parents=True)
    assert compare("--seeds", "7", "--max_steps", "4") == 1
    assert started == [
        ["train", "--resume", str(Path("out/own-ppo/seed-7"))],
        ["train", "own-grpo.yaml", "--max_steps", "4", "--seed", "7", "--output_dir", str(Path("out/own-grpo/seed-7"))],
    ]


def test_a_run_with_other_settings_is_not_taken_for_this_one(recipes, started, capsys):
    """A run may have filled in what the recipe leaves unset, such as the weights of rewards."""
    leave_run(recipes / "out/own-ppo/seed-0", [1, 1, 1])
    text = (recipes / "own-ppo.yaml").read_text() + "seed: 0\noutput_dir: elsewhere\nreward_weights: [1]\n"
    (recipes / "out/own-ppo/seed-0/config.yaml").write_text(text)
    assert compare("--seeds", "0", "--learning_rate", "0.1") == 2
    assert "learning_rate=0.001 there and 0.1 here" in capsys.readouterr().err
    assert compare("--seeds", "0") == 1
    assert [command[1] for command in started] == ["own-grpo.yaml"]


def test_unequal_budgets_are_refused_with_both_numbers_unless_allowed(recipes, started, capsys):
    with (recipes / "own-ppo.yaml").open("a") as recipe:
        recipe.write("num_epochs: 2\n")
    (recipes / "own-grpo.yaml").write_text((recipes / "own-grpo.yaml").read_text().replace("steps: 3", "steps: 5"))
    assert compare() == 2
    message = capsys.readouterr().err
    assert "own-ppo samples 12 (4 a step x 3 steps)" in message and "own-grpo samples 20" in message
    assert started == []
    assert compare("--allow-different-budgets", "--seeds", "0") == 1
    assert len(started) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "0,x"], "--seeds"),
        (["--seeds", "1,1"], "--seeds"),
        (["--seed", "1"], "seeds in --seeds"),
        (["another"], "There is no recipe 'another'"),
        (["own-ppo.yaml"], "different recipes"),
        (["--max_stepz", "1"], "max_steps"),
    ],
)
def test_a_wrong_command_is_one_message_and_nothing_runs(recipes, started, capsys, options, said):
    assert compare(*options) == 2
    assert said in capsys.readouterr().err and started == []


@pytest.mark.slow
def test_runs_are_made_once_and_their_rewards_are_those_in_metrics_jsonl(recipes, started, monkeypatch):
    """S33: a comparison on the same data."""
    with monkeypatch.context() as patch:
        patch.setattr(compare_recipes, "run_one", run_one)
        assert compare("--seeds", "3", "--jobs", "2", "--edge-steps", "2") == 0
    results = json.loads((recipes / "out/results.json").read_text())
    for name, recipe in results["recipes"].items():
        lines = (recipes / f"out/{name}/seed-3/metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward"] for line in lines]
        assert len(rewards) == 3 and recipe["completions"] == 12
        assert recipe["seeds"]["3"]["reward_first"] == pytest.approx((rewards[0] + rewards[1]) / 2)
        assert recipe["seeds"]["3"]["reward_last"] == pytest.approx((rewards[1] + rewards[2]) / 2)
        assert recipe["seeds"]["3"]["reward_mean"] == pytest.approx(sum(rewards) / 3)
    assert results["recipes"]["own-ppo"]["seeds"]["3"]["value_loss_first"] > 0
    table = (recipes / "out/table.md").read_text().split("\n\n", 1)[1]
    assert compare("--seeds", "3", "--edge-steps", "2") == 0
    assert started == [] and (recipes / "out/table.md").read_text().split("\n\n", 1)[1] == table


# ---- ppo_memory ---------------------------------------------------------------------------------------------------


def measured(case, training, process=9.0):
    return {
        "case": case,
        "start_gib": 0.5,
        "training_gib": training,
        "process_gib": process,
        "trainable_parameters": 1000,
        "seconds_per_step": 2.0,
        "device": "cpu",
    }


def memory_report(*rounds):
    rounds = [{case: measured(case, *numbers) for case, numbers in cases.items()} for cases in rounds]
    return ppo_memory.report(rounds, ppo_memory.parser().parse_args(["--repeats", str(len(rounds))]))


def test_the_ratio_is_to_grpo_of_the_same_round_and_its_median_decides():
    grpo, ppo = "grpo-lora", "ppo-lora-shared"
    text = memory_report({grpo: [2.0], ppo: [2.2]}, {grpo: [4.0], ppo: [5.2]}, {grpo: [1.0], ppo: [1.25]})
    assert cells_of(text, ppo, "0.500")[2:] == ["2.200", "9.000", "1,000", "2.00", "1.25 (1.10 to 1.30)"]
    assert "ppo-lora-shared within 1.25 x GRPO: yes" in text
    assert "within 1.25 x GRPO: no" in memory_report({grpo: [2.0], ppo: [2.51]})


def test_without_a_peak_of_the_steps_the_ratio_is_of_the_process_and_the_report_says_so():
    text = memory_report({"grpo-lora": [None, 2.0], "ppo-lora-shared": [None, 2.2]})
    assert "ratios are of the process" in text and cells_of(text, "ppo-lora-shared", "0.500")[-1] == "1.10"


def test_cases_that_did_different_work_are_not_compared():
    work = {"completions": 4, "completion_tokens": 8, "prompt_tokens": 6}
    same = [{"case": case, **work} for case in ("a", "b")]
    ppo_memory.require_same_work(same)
    with pytest.raises(SystemExit, match=r"completion_tokens differ: \{'a': 8, 'b': 7\}"):
        ppo_memory.require_same_work([same[0], {**same[1], "completion_tokens": 7}])


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="resident memory of Linux")
def test_memory_that_was_freed_before_the_steps_is_not_in_their_peak():
    size = 256 * 2**20
    block = b"1" * size  # touched, so that it is resident
    before = ppo_memory.peak_memory()
    del block
    assert ppo_memory.forget_peak()
    assert ppo_memory.peak_memory() < before - 0.5 * size / 2**30


@pytest.mark.slow
def test_every_case_is_measured_on_a_tiny_model(tmp_path):
    sizes = {"prompts": 2, "group": 2, "tokens": 4, "lora-rank": 2, "steps": 1}
    options = ["--model=scratch:tiny", *(f"--{name}={size}" for name, size in sizes.items())]
    command = [sys.executable, FOLDER / "ppo_memory.py", *options, "--json", tmp_path / "memory.json"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (cases,) = json.loads((tmp_path / "memory.json").read_text())["rounds"]
    assert list(cases) == list(ppo_memory.CASES) and all(f"| {case} |" in text for case in cases)
    for result in cases.values():
        assert (result["completions"], result["completion_tokens"]) == (4, 16)
        assert 0 < ppo_memory.peak(result) <= result["process_gib"]
    parameters = {case: result["trainable_parameters"] for case, result in cases.items()}
    assert parameters["ppo-lora-shared"] == parameters["grpo-lora"] + 64  # the head: one weight a hidden unit
    assert parameters["ppo-four-models"] > 100_000
    assert "ppo-lora-shared within 1.25 x GRPO: " in text and "ppo-lora-separate within 1.25 x GRPO: " in text


# ---- group_sizes --------------------------------------------------------------------------------------------------


def test_effective_sizes_of_a_group_by_hand():
    """Two completions of two tokens, log-probabilities summing to 0 and -2: weights 0.880797 and 0.119203.

    Their squares sum to 0.790012, so the effective size is 1.265803. The means differ by 1: weights 0.731059 and
    0.268941, size 1 / 0.606776 = 1.648053. The sample standard deviation of 0 and -2 is root 2.
    """
    rollouts = rollouts_from_tokens(
        [[3], [3]],
        [[4, 5], [5, 4]],
        SimpleNamespace(pad_token_id=0, decode=lambda *_, **__: ""),
        stop_token_ids=[],
        sampling_logprobs=[[0.0, 0.0], [-1.0, -1.0]],
    )
    found = group_sizes.sizes(rollouts, group=2)
    assert found["logprob"] == pytest.approx(1.265803, abs=1e-5)
    assert found["averaged"] == pytest.approx(1.648053, abs=1e-5)
    assert found["spread"] == pytest.approx(2**0.5)
    assert (found["tempered"], found["scale"]) == (found["logprob"], 1.0)  # half of two is one, which it has


def test_group_sizes_prints_a_row_for_each_length(recipes, capsys):
    (recipes / "own.yaml").write_text(f"algorithm: tpo\n{RECIPE}")
    assert group_sizes.main(["--recipe", "own.yaml", "--tokens", "1,4", "--prompts", "2", "--group", "4"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("| 1", "| 4")]
    assert [row.split(" | ")[2] for row in rows] == ["1", "4"]  # lengths as asked for
