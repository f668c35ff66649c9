"""What a run shows while it trains."""

from __future__ import annotations

import io

import pytest

from quintain.trackers import ConsoleTracker
from quintain.trackers.console import readable, summary_line

METRICS = {"reward": 0.41234, "kl": 0.00213, "clip_fraction": 0.125, "grad_norm": 1.5, "completions/mean_length": 22.5}


def test_without_a_terminal_a_step_is_one_plain_line():
    stream = io.StringIO()
    tracker = ConsoleTracker(total_steps=25, stream=stream)
    tracker.log(3, METRICS)
    tracker.close()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step  3/25  reward 0.412  KL 0.00213  clipped 0.125  grad norm 1.5  length 22.5")
    assert line.endswith(" left")


def test_plain_output_holds_no_control_characters_whatever_the_model_writes():
    stream = io.StringIO()
    tracker = ConsoleTracker(total_steps=2, stream=stream)
    tracker.log_completions([{"step": 1, "prompt": "a\x1b[31mred", "completion": "b\r\x07\nc\u202e"}])
    tracker.log(2, METRICS)
    tracker.close()
    assert all(character.isprintable() for line in stream.getvalue().split("\n") for character in line)
    assert "sample: a [31mred -> b" in stream.getvalue()


def test_samples_are_shown_at_the_first_step_and_now_and_then():
    """S67."""
    stream = io.StringIO()
    tracker = ConsoleTracker(total_steps=20, start_step=5, stream=stream, sample_every=10)
    for step in range(6, 21):
        tracker.log_completions([{"step": step, "prompt": f"p{step}", "completion": "c"}])
    shown = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert shown == ["p6", "p10", "p20"]


def test_the_live_view_shows_progress_numbers_and_a_completion():
    stream = io.StringIO()
    tracker = ConsoleTracker(total_steps=25, stream=stream, live=True)
    tracker.log(3, METRICS)
    tracker.log_completions([{"step": 3, "prompt": "Once", "completion": "upon [bold]a time"}])
    tracker.close()
    text = stream.getvalue()
    assert "3/25" in text and "reward 0.412" in text and "upon [bold]a time" in text and "left" in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}], "there"),
        ([], ""),
        ("x" * 400, "x" * 297 + "..."),
        (None, "None"),
    ],
)
def test_a_completion_is_shown_on_one_line_of_bounded_length(text, line):
    assert readable(text) == line


def test_the_summary_leaves_out_what_an_algorithm_does_not_have_and_marks_what_is_not_a_number():
    """S62."""
    assert (
        summary_line(7, {"reward": None, "loss/value": 0.25, "unknown": 1.0}) == "step 7  reward nan  value loss 0.25"
    )
