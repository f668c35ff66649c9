"""The checked boundary to reward functions (T07): what is accepted, what is refused, and what an error says."""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from reward_rollouts import make_rollouts

from quintain.errors import ConfigError, RewardError
from quintain.rewards import RewardPipeline

TEXTS = [f"completion {row}" for row in range(8)]
ANSWERS = [f"answer {row}" for row in range(8)]


def score(function: Any, **settings: Any) -> Any:
    """Score eight completions whose dataset column `answer` is known."""
    return RewardPipeline(function, columns=["answer"], **settings).score(
        make_rollouts(TEXTS, columns={"answer": ANSWERS})
    )


def returning(value: Any) -> Any:
    def judge(completions: list[str], **kwargs: Any) -> Any:
        return value

    return judge


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([1.0], "1 entries"),
        ([1.0] * 7, "7 entries"),
        (torch.ones(8, 1), r"shape \(8, 1\)"),
        (torch.ones(1, 8), r"shape \(1, 8\)"),
        (np.ones((8, 8)), r"shape \(8, 8\)"),
        (torch.tensor(1.0), r"shape \(\)"),
        (1.0, "one float"),
        (None, "one NoneType"),
        ("12345678", "one str"),
        (dict.fromkeys(range(8), 1.0), "one dict"),
    ],
)
def test_a_result_that_is_not_eight_entries_is_refused_and_never_broadcast(value: Any, found: str) -> None:
    """T07 a, b, g."""
    with pytest.raises(RewardError, match=f"'judge' returned .*{found}, expected 8"):
        score(returning(value))


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (-float("inf"), "-inf"),
        (1e39, r"1e\+39"),
        (10**400, "inf"),
        ("good", "str 'good'"),
        (1j, "complex 1j"),
        ({}, "dict {}"),
        ([], "an empty list"),
        ([1.0, None], "NoneType None"),
        ([1.0, float("nan")], "nan"),
    ],
)
def test_an_entry_that_is_not_a_finite_number_is_refused_with_its_row(entry: Any, found: str) -> None:
    """T07 c, d, e."""
    values: list[Any] = [0.5] * 8
    values[3] = entry
    with pytest.raises(RewardError, match=f"'judge' returned {found} for row 3, expected a finite number"):
        score(returning(values))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(8.0).requires_grad_() * 1,
        torch.arange(8).to(torch.bfloat16),
        np.arange(8, dtype=np.float64),
        list(range(8)),
        tuple(float(row) for row in range(8)),
        [np.float32(row) for row in range(8)],
        [torch.tensor(float(row), requires_grad=True) for row in range(8)],
        [Fraction(row) for row in range(8)],
    ],
    ids=["tensor with a graph", "bfloat16", "float64 array", "integers", "tuple", "numpy", "scalars", "fractions"],
)
def test_any_eight_numbers_become_float32_without_a_graph(value: Any) -> None:
    """T07 f, h."""
    output = score(returning(value))
    assert output.rewards.tolist() == list(range(8))
    assert output.rewards.dtype == torch.float32
    assert not output.rewards.requires_grad
    assert not output.components["judge"].requires_grad


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_truth_values_count_as_one_and_zero(convert: Any) -> None:
    """T07 i."""
    assert score(returning(convert([True, False] * 4))).rewards.tolist() == [1.0, 0.0] * 4


def test_a_missing_column_is_refused_at_construction_with_the_available_ones() -> None:
    """T07 j."""

    def judge(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match=r"'judge' asks for 'solution'.*Available columns: answer, level\."):
        RewardPipeline(judge, columns=["level", "answer"])
    with pytest.raises(ConfigError, match=r"'solution'.*Available columns: answer\."):
        RewardPipeline(judge).score(make_rollouts(TEXTS, columns={"answer": ANSWERS}))


def test_a_misspelt_keyword_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'completions'"):
        RewardPipeline(lambda completion: [0.0], columns=[])
    with pytest.raises(ConfigError, match="Did you mean 'prompts'"):
        RewardPipeline(lambda prompt: [0.0], columns=["prompt"])


def test_an_exception_is_kept_and_the_row_it_had_reached_is_named() -> None:
    """T07 k."""

    def judge(completions: list[str], answer: list[str]) -> list[float]:
        rewards = []
        for text, reference in zip(completions, answer):
            if text == "completion 5":
                raise ValueError("cannot judge this")
            rewards.append(float(len(text) + len(reference)))
        return rewards

    with pytest.raises(RewardError, match=r"'judge' raised ValueError \(.*row 5\): cannot judge this") as caught:
        score(judge)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None


def test_the_row_is_named_when_a_function_counts_with_an_index() -> None:
    def judge(completions: list[str], **kwargs: Any) -> list[float]:
        return [1 / (5 - row) + len(completions[row]) for row in range(len(completions))]

    with pytest.raises(RewardError, match=r"ZeroDivisionError \(rows 0 to 7, the last it read was row 4\)"):
        score(judge)


def test_an_exception_before_any_row_is_read_names_no_row() -> None:
    def judge(**kwargs: Any) -> list[float]:
        raise ConnectionError("no route")

    with pytest.raises(RewardError, match=r"'judge' raised ConnectionError \(rows 0 to 7, before it read any\)"):
        score(judge)


def test_partials_objects_and_lambdas_get_different_names() -> None:
    """T07 l."""

    def judge(completions: list[str], scale: float, **kwargs: Any) -> list[float]:
        return [scale] * len(completions)

    class Grader:
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [2.0] * len(completions)

    pipeline = RewardPipeline(
        [functools.partial(judge, scale=1.0), Grader(), lambda completions: [4.0] * len(completions)], columns=[]
    )
    assert pipeline.names == ["judge", "Grader", "lambda"]
    output = pipeline.score(make_rollouts(TEXTS))
    assert output.rewards.tolist() == [7.0] * 8
    assert list(output.components) == pipeline.names


def test_functions_of_one_name_are_numbered() -> None:
    functions = [functools.partial(returning([0.0] * 8)), returning([0.0] * 8), returning([1.0] * 8)]
    assert RewardPipeline(functions).names == ["judge", "judge_2", "judge_3"]


def test_each_completion_meets_its_own_prompts_columns() -> None:
    """T07: `answer` has 8 entries, and entry i belongs to completion i."""
    seen: dict[str, Any] = {}

    def judge(prompts: Any, completions: Any, completion_ids: Any, answer: Any, trainer_state: Any) -> list[float]:
        seen.update(
            prompts=prompts, completions=completions, ids=completion_ids, answer=answer, trainer_state=trainer_state
        )
        return [0.0] * 8

    rollouts = make_rollouts(TEXTS, lengths=[1, 2, 3, 1, 2, 3, 1, 2], columns={"answer": ANSWERS})
    RewardPipeline(judge).score(rollouts, trainer_state="state")
    assert seen["completions"] == TEXTS and seen["answer"] == ANSWERS and seen["trainer_state"] == "state"
    assert seen["ids"] == [[10], [10, 11], [10, 11, 12]] * 2 + [[10], [10, 11]]


def test_only_the_keywords_that_a_signature_names_are_passed() -> None:
    seen: dict[str, Any] = {}

    def narrow(completions: list[str]) -> list[float]:
        return [0.0] * 8

    def wide(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 8

    RewardPipeline([narrow, wide]).score(make_rollouts(TEXTS, columns={"answer": ANSWERS}))
    assert set(seen) == {
        "prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric",
    }  # fmt: skip


def test_a_keyword_bound_by_a_partial_is_not_replaced_by_a_column() -> None:
    def judge(completions: list[str], answer: Any) -> list[float]:
        return [float(answer == "mine")] * 8

    def any_keyword(**kwargs: Any) -> list[float]:
        return [float(kwargs["answer"] == "mine")] * 8

    for function in (judge, any_keyword):
        assert score(functools.partial(function, answer="mine")).rewards.tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (3, "must be a callable"),
        (dict, "is a class; pass an instance"),
        ([], "reward_funcs is empty"),
        (eval("lambda completions, /: []"), "positional-only parameter 'completions'"),
    ],
)
def test_what_cannot_be_called_by_keyword_is_refused_at_construction(functions: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardPipeline(functions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_reward_error": "unscord"}, "Did you mean 'unscored'"),
        ({"reward_timeout": 0}, "reward_timeout must be a positive number"),
        ({"reward_clip": -1.0}, "reward_clip must be"),
        ({"reward_clip": (1.0, 0.0)}, "reward_clip must be"),
        ({"weights": [1.0, 2.0]}, "reward_weights has 2, reward_funcs has 1"),
        ({"weights": [float("nan")]}, "reward_weights must be finite"),
        ({"weights": [0.0]}, "must not all be 0"),
        ({"processing_classes": [None, None]}, "reward_processing_classes .* got 2, and reward_funcs has 1"),
    ],
)
def test_a_setting_out_of_range_is_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    """T08 h among them."""
    with pytest.raises(ConfigError, match=message):
        RewardPipeline(returning([0.0] * 8), **settings)


def test_a_column_that_a_standard_keyword_hides_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    RewardPipeline(returning([0.0] * 8), columns=["completions"])
    assert "'completions'" in caplog.text


@pytest.mark.parametrize("failure", ["exception", "nan", "count", "per sample"])
def test_a_failed_call_leaves_its_rows_unscored_when_asked_to(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    from quintain.rewards import per_sample

    def judge(completions: list[str], **kwargs: Any) -> list[Any]:
        if failure == "exception":
            raise ConnectionError("no route")
        return [1.0] * 7 if failure == "count" else [1.0] * 7 + [float("nan")]

    @per_sample
    def rowwise(completion: str) -> float:
        return 1 / (7 - int(completion[-1]))

    pipeline = RewardPipeline(rowwise if failure == "per sample" else judge, on_reward_error="unscored")
    output = [pipeline.score(make_rollouts(TEXTS)) for _ in range(2)][-1]
    lost = 1 if failure in ("nan", "per sample") else 8
    assert output.scored.tolist() == [True] * (8 - lost) + [False] * lost
    assert output.metrics[f"rewards/{pipeline.names[0]}/errors"] == lost
    assert output.rewards.isfinite().all()
    assert len(caplog.records) == 1, "warned once, not at every step"
