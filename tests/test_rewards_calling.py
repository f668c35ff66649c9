"""How reward functions are run: copies, threads, coroutines, time limits, logging."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
import time
from typing import Any

import pytest
from reward_rollouts import make_rollouts

from quintain.errors import ConfigError, RewardError
from quintain.rewards import RewardPipeline, per_sample
from quintain.rewards.arguments import ReadPosition, RowList

TEXTS = [f"completion {row}" for row in range(8)]


def test_a_function_that_changes_its_arguments_hurts_nobody() -> None:
    """Neither the rollouts, nor the next function, nor another row that shares the prompt."""
    message = {"role": "user", "content": "hello"}
    prompts = [[message]] * 2
    rollouts = make_rollouts([[{"role": "assistant", "content": "a"}] for _ in range(2)], prompts=prompts)
    rollouts = rollouts.replace(columns={"tags": [["x"]] * 2})
    seen: list[Any] = []

    def vandal(prompts: Any, completions: Any, completion_ids: Any, tags: Any) -> list[float]:
        prompts[0][0]["content"] = "changed"
        seen.append(prompts[1][0]["content"])
        completions[0].clear()
        completions.pop()
        completion_ids[0].append(99)
        tags[0].append("y")
        return [0.0] * 2

    def witness(prompts: Any, completions: Any, completion_ids: Any, tags: Any) -> list[float]:
        seen.extend([prompts[0][0]["content"], len(completions), len(completions[0]), completion_ids[0], tags[0]])
        return [0.0] * 2

    RewardPipeline([vandal, witness]).score(rollouts)
    assert seen == ["hello", "hello", 2, 1, [10, 11, 12], ["x"]]
    assert message["content"] == "hello"
    assert rollouts.completions[0] == [{"role": "assistant", "content": "a"}]
    assert rollouts.columns["tags"] == [["x"]] * 2


def test_a_functions_lists_are_plain_lists_in_another_process() -> None:
    position = ReadPosition()
    copy = pickle.loads(pickle.dumps(RowList(["a", "b"], position)))
    assert copy == ["a", "b"] and type(copy) is list
    assert position.row is None


def test_asynchronous_functions_run_at_the_same_time() -> None:
    """Each waits for the other to have started: one after the other would never end."""
    started = [threading.Event(), threading.Event()]

    def waiting(own: int, other: int) -> Any:
        async def judge(completions: list[str], **kwargs: Any) -> list[float]:
            started[own].set()
            while not started[other].is_set():
                await asyncio.sleep(0.005)
            return [float(own)] * len(completions)

        return judge

    class Grader:
        async def __call__(self, completions: list[str]) -> list[float]:
            return list(await waiting(1, 0)(completions))

    pipeline = RewardPipeline([waiting(0, 1), Grader()], reward_timeout=5)
    assert pipeline.score(make_rollouts(TEXTS)).rewards.tolist() == [1.0] * 8


def test_all_asynchronous_calls_share_one_event_loop_over_steps() -> None:
    """Clients of web services keep connections that belong to the loop they were opened on."""
    loops = set()

    async def judge(completions: list[str]) -> list[float]:
        loops.add(asyncio.get_running_loop())
        return [0.0] * len(completions)

    for _ in range(2):
        RewardPipeline([judge, functools.partial(judge)]).score(make_rollouts(TEXTS))
    assert len(loops) == 1


def test_asynchronous_functions_work_inside_a_running_loop() -> None:
    """As in a notebook."""

    async def judge(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    async def notebook_cell() -> Any:
        return RewardPipeline(judge).score(make_rollouts(TEXTS))

    assert asyncio.run(notebook_cell()).rewards.tolist() == [1.0] * 8


@pytest.mark.parametrize("kind", ["object", "lambda"])
def test_coroutines_from_objects_and_lambdas_are_awaited(kind: str) -> None:
    class Grader:
        async def __call__(self, completions: list[str]) -> list[float]:
            await asyncio.sleep(0)
            return [3.0] * len(completions)

    grader = Grader()
    function = grader if kind == "object" else (lambda completions: grader(completions))
    assert RewardPipeline(function).score(make_rollouts(TEXTS)).rewards.tolist() == [3.0] * 8


def test_per_sample_calls_run_in_threads_and_keep_their_order() -> None:
    """The barrier lets nobody through until four calls are in progress."""
    barrier = threading.Barrier(4, timeout=5)

    @per_sample(max_concurrency=4)
    def judge(prompt: str, completion: str, answer: str, completion_ids: list[int]) -> float:
        barrier.wait()
        assert prompt == "a prompt" and answer == completion.replace("completion", "answer")
        return float(completion[-1]) + len(completion_ids)

    rollouts = make_rollouts(TEXTS, columns={"answer": [f"answer {row}" for row in range(8)]})
    output = RewardPipeline(judge, columns=["answer"]).score(rollouts)
    assert output.rewards.tolist() == [3.0 + row for row in range(8)]


def test_asynchronous_per_sample_calls_keep_to_their_limit() -> None:
    running, most = 0, 0

    @per_sample(max_concurrency=3)
    async def judge(completion: str, **kwargs: Any) -> float:
        nonlocal running, most
        assert "completions" not in kwargs
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return float(completion[-1])

    assert RewardPipeline(judge).score(make_rollouts(TEXTS)).rewards.tolist() == list(range(8))
    assert most == 3


def test_per_sample_works_through_partials_and_methods_and_batch_names() -> None:
    class Grader:
        @per_sample
        def __call__(self, completions: str) -> float:
            return float(completions[-1])

        @per_sample
        def method(self, completion: str, scale: float) -> float:
            return scale * float(completion[-1])

    functions = [Grader(), functools.partial(Grader().method, scale=10.0)]
    output = RewardPipeline(functions).score(make_rollouts(TEXTS))
    assert output.rewards.tolist() == [11.0 * row for row in range(8)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_per_sample_error_names_its_row_and_is_kept(asynchronous: bool) -> None:
    """T07 k."""

    def check(completion: str) -> list[float] | float:
        if completion.endswith("5"):
            raise ValueError("cannot judge this")
        return [1.0, 2.0]

    async def check_later(completion: str) -> Any:
        return check(completion)

    function = per_sample(check_later if asynchronous else check)
    with pytest.raises(RewardError, match=rf"'{function.__name__}' raised ValueError \(row 5\)") as caught:
        RewardPipeline(function).score(make_rollouts(TEXTS))
    assert isinstance(caught.value.__cause__, ValueError)


def test_per_sample_refuses_a_concurrency_below_one() -> None:
    with pytest.raises(ConfigError, match="max_concurrency must be at least 1"):
        per_sample(max_concurrency=0)


def sleepy(completions: list[str]) -> list[float]:
    time.sleep(30)
    return [0.0] * len(completions)


async def sleepy_politely(completions: list[str]) -> list[float]:
    await asyncio.sleep(30)
    return [0.0] * len(completions)


async def sleepy_blocking(completions: list[str]) -> list[float]:
    time.sleep(3)
    return [0.0] * len(completions)


@per_sample
def sleepy_row(completion: str) -> float:
    if completion.endswith("6"):
        time.sleep(30)
    return 0.0


@pytest.mark.parametrize("function", [sleepy, sleepy_politely, sleepy_blocking, sleepy_row])
def test_a_call_that_exceeds_its_time_limit_is_an_error_that_says_so(function: Any) -> None:
    started = time.monotonic()
    where = "row 6" if function is sleepy_row else "rows 0 to 7"
    with pytest.raises(
        RewardError, match=rf"'{function.__name__}' did not return within reward_timeout=0.2 seconds \({where}"
    ):
        RewardPipeline(function, reward_timeout=0.2).score(make_rollouts(TEXTS))
    assert time.monotonic() - started < 2.5


def test_a_blocked_event_loop_does_not_stop_later_calls() -> None:
    async def quick(completions: list[str]) -> list[float]:
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match="sleepy_blocking"):
        RewardPipeline(sleepy_blocking, reward_timeout=0.05).score(make_rollouts(TEXTS))
    assert RewardPipeline(quick, reward_timeout=1).score(make_rollouts(TEXTS)).rewards.tolist() == [1.0] * 8


def test_a_functions_own_timeout_error_is_not_mistaken_for_the_limit() -> None:
    def judge(completions: list[str]) -> list[float]:
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match=r"raised TimeoutError .*the judge did not answer"):
        RewardPipeline(judge, reward_timeout=5).score(make_rollouts(TEXTS))


def test_without_a_time_limit_a_plain_function_runs_in_the_callers_thread() -> None:
    """Some libraries use signals, which only the main thread may."""
    threads = []

    def judge(completions: list[str]) -> list[float]:
        threads.append(threading.current_thread())
        return [0.0] * len(completions)

    RewardPipeline(judge).score(make_rollouts(TEXTS))
    assert threads == [threading.current_thread()]


def test_functions_log_columns_and_averaged_metrics() -> None:
    def judge(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("verdict", [text.upper() for text in completions])
        log_metric("accuracy", 1)
        log_metric("accuracy", 0.5)
        return [0.0] * len(completions)

    @per_sample
    def rowwise(completion: str, log_extra: Any, log_metric: Any) -> float:
        if completion != TEXTS[0]:
            log_extra("digit", int(completion[-1]))
        log_metric("digits", int(completion[-1]))
        return 0.0

    output = RewardPipeline([judge, rowwise]).score(make_rollouts(TEXTS))
    assert output.extra == {"verdict": [text.upper() for text in TEXTS], "digit": [None, *range(1, 8)]}
    assert output.metrics == {"accuracy": 0.75, "digits": 3.5}


def test_a_logged_column_of_another_length_is_refused() -> None:
    def judge(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("verdict", ["only one"])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"'judge' raised .*log_extra\('verdict', \.\.\.\) got 1 entries, expected 8"):
        RewardPipeline(judge).score(make_rollouts(TEXTS))
