"""A report is one page that shows a run as it was, whatever the run wrote, and needs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from quintain.errors import DataError
from quintain.report.render import write_report

CONFIG = {
    "algorithm": "grpo",
    "model": "scratch:tiny",
    "dataset": "builtin:reversal",
    "epsilon": 0.2,
    "num_epochs": 2,
    "max_steps": 40,
    "stop_strings": ["</s>"],
    "environment": {"python": "3.12.1", "torch": "2.13.0", "git_revision": None},
}


def write_lines(path: Path, rows: list[dict], tail: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, encoding="utf-8")


def make_run(folder: Path, *, reward: float = 0.2, **extra: float) -> Path:
    """Ten steps in which the reward rises by 0.05 a step."""
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "reward": reward + 0.05 * step,
            "kl": 0.01,
            "entropy": 2.0 - 0.1 * step,
            "time/rollout": 3.0,
            "time/fit": 4.0,
            "time/step": 8.0,
            "tokens_per_second": 100.0,
            **extra,
        }
        for step in range(10)
    ]
    write_lines(folder / "metrics.jsonl", rows)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


def write_completions(run: Path, steps: range, prompt: object, completion: object) -> None:
    rows = [
        {
            "step": step,
            "prompt": prompt,
            "completion": completion,
            "reward": None if row == 0 else row / 8,
            "rewards": {"exact_match": row / 8},
            "note_of_row": f"step{step}row{row}",
        }
        for step in steps
        for row in range(8)
    ]
    write_lines(run / "completions.jsonl", rows)


def page_of(run: Path) -> str:
    return write_report([run]).read_text(encoding="utf-8")


def visible(page: str) -> str:
    """The page's text without tags, in one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page))


def test_the_page_of_one_run_lies_in_its_folder_and_leads_with_its_numbers(tmp_path: Path) -> None:
    """First five steps: 0.3 on average; last five: 0.55. Ten steps of eight seconds."""
    run = make_run(tmp_path / "first")
    assert write_report([run]) == run / "report.html"
    text = visible(page_of(run))
    assert "0.3 → 0.55" in text
    assert "+0.25, 5.0 standard errors" in text
    assert "1 min 20 s" in text
    assert "scratch:tiny" in text and "3.12.1" in text
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_the_page_asks_nothing_of_the_network_and_runs_no_script(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_completions(run, range(3), "p", "c")
    page = page_of(run)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"@import|url\((?!#)", page)
    assert "<script" not in page and "<link" not in page and "<?xml" not in page
    assert page.lower().count("<!doctype") == 1 and ".dtd" not in page
    assert "default-src 'none'" in page


def test_what_a_model_wrote_is_shown_as_text(tmp_path: Path) -> None:
    attack = "</div><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
    run = make_run(tmp_path / "run")
    write_completions(run, range(1), attack, [{"role": "<b>r</b>", "content": attack}])
    write_lines(
        run / "findings.jsonl",
        [{"severity": "warn", "rule": attack, "step": 3, "message": attack, "meaning": attack, "advice": attack}],
    )
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "model": attack}))
    page = page_of(run)
    assert "<script" not in page and "<img" not in page and "<b>r</b>" not in page
    assert "&lt;script&gt;alert(1)" in page and "{{ 7 * 7 }}" in page


def test_curves_are_well_formed_and_take_their_colours_from_the_page(tmp_path: Path) -> None:
    """Light and dark: every colour of a drawing is a variable of the style sheet."""
    page = page_of(make_run(tmp_path / "run", clip_fraction=0.2))
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 5  # reward, KL, entropy, clip fraction, time
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        colours = set(re.findall(r"(?:stroke|fill): (#[0-9a-f]+)", drawing))
        assert not {colour for colour in colours if colour.startswith("#a0b0")}
        assert "var(--series-0)" in drawing


def test_the_clip_fraction_is_shown_only_where_rollouts_are_reused(tmp_path: Path) -> None:
    """W7."""
    run = make_run(tmp_path / "run", clip_fraction=0.0)
    assert "Clip fraction" in page_of(run)
    (run / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "num_epochs": 1}))
    assert "Clip fraction" not in page_of(run)


def test_several_runs_share_charts_with_a_legend_and_a_table(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a" / "seed"), make_run(tmp_path / "b" / "seed", reward=0.4, explained_variance=0.1)]
    output = write_report(runs)
    assert output == tmp_path / "a" / "comparison.html"
    page = output.read_text(encoding="utf-8")
    charts = re.findall(r"<figure.*?</figure>", page, flags=re.DOTALL)
    reward = next(chart for chart in charts if "<h3>Reward</h3>" in chart)
    assert "a/seed" in reward and "b/seed" in reward
    assert "var(--series-0)" in reward and "var(--series-1)" in reward
    critic = next(chart for chart in charts if "<h3>Explained variance</h3>" in chart)
    assert "b/seed" in critic and "a/seed" not in critic and "var(--series-1)" in critic
    assert "0.3 → 0.55" in visible(page) and "0.5 → 0.75" in visible(page)


def test_the_output_can_be_put_anywhere(tmp_path: Path) -> None:
    target = tmp_path / "out" / "page.html"
    assert write_report([make_run(tmp_path / "run")], target) == target
    assert target.is_file() and not (tmp_path / "run" / "report.html").exists()


def test_completions_come_from_the_first_middle_and_last_step_best_first(tmp_path: Path) -> None:
    """S67: four of eight, from the best to the worst, and the unscored one last."""
    run = make_run(tmp_path / "run")
    write_completions(run, range(5), "Tell me.", "Well.")
    assert re.findall(r"step\drow\d", page_of(run)) == [
        f"step{step}row{row}" for step in (0, 2, 4) for row in (7, 5, 3, 0)
    ]


def test_a_long_completion_is_cut_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_completions(run, range(1), "p", "x" * 1600)
    page = page_of(run)
    assert "x" * 1500 + " … (100 more characters)" in page and "x" * 1501 not in page


def test_missing_files_and_damaged_lines_are_said_on_the_page(tmp_path: Path) -> None:
    """A run that was killed while it wrote, and that logged no completions."""
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "rew')
    text = visible(page_of(run))
    assert "Lines of metrics.jsonl that could not be read: 1" in text
    assert "No completions were logged" in text
    (run / "config.yaml").unlink()
    assert "config.yaml is missing" in visible(page_of(run))


def test_a_run_without_a_step_still_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    assert "No step has been recorded yet" in visible(page_of(run))


def test_numbers_that_were_not_finite_leave_a_gap(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(
        run / "metrics.jsonl", [{"step": step, "reward": None if step == 4 else 1.0, "kl": None} for step in range(9)]
    )
    page = page_of(run)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", page.lower())
    assert "<h3>Reward</h3>" in page and "<h3>KL</h3>" not in page


def test_text_that_is_not_valid_unicode_does_not_stop_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_completions(run, range(1), "p", "half a pair: \ud83d.")
    assert "half a pair: ?." in page_of(run)


def test_findings_are_those_the_run_kept_or_else_the_doctors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", kl=9.0)
    assert "kl_jump" in page_of(run)
    kept = {"severity": "note", "rule": "own_rule", "step": 3, "message": "m", "meaning": "use `beta`", "advice": "a"}
    write_lines(run / "findings.jsonl", [kept])
    page = page_of(run)
    assert "own_rule" in page and "kl_jump" not in page
    assert "use <code>beta</code>" in page
    (run / "findings.jsonl").write_text("")
    assert "The doctor found nothing." in page_of(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        write_report([tmp_path])
    with pytest.raises(DataError, match="one or more different run folders"):
        write_report([])
    run = make_run(tmp_path / "run")
    with pytest.raises(DataError, match="one or more different run folders"):
        write_report([run, run])
