"""docs/tpo.md runs as printed, and what it names exists (S31-S33, W1, W2, W5)."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
from dataclasses import fields

import pytest
from test_docs_examples import ROOT, blocks

from quintain import ConfigError, TPOConfig, TPOTrainer
from quintain.cli.reproduce import add_reproduce_parser
from quintain.reproduce.algorithms import find_algorithm

PAGE = (ROOT / "docs" / "tpo.md").read_text(encoding="utf-8")
RULES = TPOConfig.rules


def section(title: str) -> str:
    """The text under a heading of second or third order, up to the next heading of either."""
    return re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##+ |\Z)", PAGE, flags=re.M | re.S).group(1)


def table(text: str) -> list[list[str]]:
    """The cells of each row of the only table in a text, without its head."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(text: str) -> set[str]:
    """The fragments that a page's headings are linked by."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    """Its own assertions, then what it says of the output: W2's spreads, the table of first updates, both ends."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(PAGE):
        exec(block, names)
    printed = capsys.readouterr().out.splitlines()

    shown = [block.strip().splitlines() for block in re.findall(r"```\n(logprob .*?)```", PAGE, flags=re.S)]
    assert len(shown) == 1 and shown[0] == [line for line in printed if "effective size" in line]
    spreads = next(line for line in printed if line.startswith("standard deviation"))
    online, target = re.findall(r"\d\.\d+", spreads)
    assert f"({online} and {target})" in section("What an average does").replace("\n", " ")
    assert sum("(0, 1)" in line for line in printed) == 2

    for rewards in (names["tpo_rewards"], names["grpo_rewards"]):
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_the_scripts_for_tpo_and_grpo_differ_in_the_algorithms_name_alone():
    """S2, S31."""
    ours, theirs, _ = blocks(section("TPO beside GRPO"))
    assert ours != theirs
    assert ours.replace("TPO", "GRPO").replace("tpo", "grpo") == theirs


def test_every_setting_of_the_table_has_the_default_it_says():
    rows = table(section("The equations"))
    stated = {}
    for _, names, defaults in rows:
        stated.update(zip(quoted(names), ast.literal_eval(f"({defaults},)"), strict=True))
    assert {"eta", "beta", "ema_decay", "anchor"} <= set(stated)
    assert stated == {name: getattr(TPOConfig(), name) for name in stated}


def test_the_page_has_a_line_for_every_form_of_loss_and_every_kind_of_group_logit():
    """W5: two forms are here, and a third method of the same letters is not."""
    forms = table(section("Three things called TPO"))
    assert {name for row in forms for name in re.findall(r'loss_type="(\w+)"', row[2])} == set(
        RULES["loss_type"].choices
    )
    assert "Triple Preference Optimization" in forms[-1][0] and "not here" in forms[-1][2]
    kinds = {quoted(row[0])[0].strip('"') for row in table(section("Long completions"))}
    assert kinds == set(RULES["group_logits"].choices)


def test_the_page_names_every_setting_that_only_tpo_has():
    shared = {item.name for item in fields(TPOConfig.__bases__[0])}
    own = {item.name for item in fields(TPOConfig)} - shared
    assert own and own <= set(re.findall(r"\w+", PAGE))


def test_every_metric_to_watch_is_in_the_log(make_trainer):
    trainer = make_trainer(TPOTrainer, anchor="ref", max_steps=1)
    trainer.train()
    log = trainer.run.state.log_history[0]
    watched = [key for row in table(section("What to watch")) for key in quoted(row[0]) if "=" not in key]
    assert len(watched) > 10
    assert [key for key in watched if key not in log] == []


@pytest.mark.parametrize("setting", [{"group_logits": "logratio"}, {"group_logits": "tempered"}])
def test_the_effective_size_reads_as_the_page_says(setting, make_trainer):
    """The whole group with log-ratios; not below half of it when tempered."""
    trainer = make_trainer(TPOTrainer, max_steps=1, num_generations=4, **setting)
    trainer.train()
    size = trainer.run.state.log_history[0]["group/effective_size"]
    if setting["group_logits"] == "logratio":
        assert size == pytest.approx(4)
    else:
        assert size >= 2 - 1e-3


def test_a_loss_that_would_not_be_called_is_refused_as_the_page_says(make_trainer):
    class Own(TPOTrainer):
        def tpo_loss(self, *arguments):
            return super().tpo_loss(*arguments)

    make_trainer(Own, loss_type="policy_gradient")
    with pytest.raises(ConfigError, match="tpo_loss"):
        make_trainer(Own)


def test_links_and_files_that_the_page_names_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose(PAGE)) if not link.startswith("http")]
    assert links
    for link in links:
        name, _, fragment = link.partition("#")
        file = ROOT / "docs" / (name or "tpo.md")
        assert file.is_file(), link
        assert not fragment or fragment in anchors(file.read_text(encoding="utf-8")), link
    named = re.findall(r"(?:tests|benchmarks)/\w+\.py", PAGE)
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_commands_that_reproduce_the_paper_are_understood():
    parser = argparse.ArgumentParser()
    add_reproduce_parser(parser.add_subparsers())
    commands = re.findall(r"^quintain (reproduce [^#\n]*)", section("Reproducing the paper"), flags=re.M)
    read = [parser.parse_args(command.split()) for command in commands]
    assert any(options.table == "3" for options in read)
    assert [find_algorithm(name) for options in read for name in options.algorithms]


def final_errors(file, algorithm, length):
    """In percent, seed by seed, as far as the page's one digit tells."""
    runs = json.loads((ROOT / "docs/results/tpo-paper" / file).read_text(encoding="utf-8"))
    chosen = [run for run in runs if (run["algorithm"], run["length"]) == (algorithm, length)]
    assert [run["seed"] for run in chosen] == list(range(len(chosen))) and chosen
    return pytest.approx([100 * run["final_error"] for run in chosen], abs=0.051)


def numbers(cell):
    return [float(number) for number in cell.split(", ")]


def test_the_errors_on_the_page_are_those_of_the_committed_runs():
    rows = table(section("Reproducing the paper"))
    for row, (length, algorithm) in zip(rows, itertools.product((7, 10), ("tpo", "grpo")), strict=True):
        assert numbers(row[2]) == final_errors("table-3.json", algorithm, length)
    runs = json.loads((ROOT / "docs/results/tpo-paper/table-3.json").read_text(encoding="utf-8"))
    assert {len(run["errors"]) for run in runs} == {2000}  # full length
    rows = table(section("Why ours differs"))
    for row, algorithm in zip(rows, ("tpo", "grpo", "grpo-sequence"), strict=True):
        assert numbers(row[1]) == final_errors("forms-7.json", algorithm, 7)
        assert numbers(row[3]) == final_errors("published-muon-7.json", algorithm, 7)


def test_the_checklist_answers_what_a_stranger_asks():
    """S33: trainer exists, target updates, KL base, decay range, inherit don't fork, tests, same-data comparison."""
    rows = table(section("Troubleshooting"))
    assert all(len(row) == 3 and all(row) for row in rows)
    checks = " ".join(" ".join(row) for row in rows)
    wanted = ("import TPOTrainer", "target_kl_gap", "reference_slot", "ema_decay", "subclass", "pytest", "--seeds")
    assert [check for check in wanted if check not in checks] == []
