"""Running reward functions: in the caller's thread, in a pool of threads or on an event loop, with a time limit."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from quintain.rewards.signature import RewardFunction

GRACE_SECONDS = 1.0
"""How long past its time limit an asynchronous call may take to give up before its event loop counts as blocked."""


class CallTimeout(Exception):
    """A call exceeded its time limit; told apart from a TimeoutError that a function raises itself."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no result within {seconds:g} seconds")
        self.seconds = seconds


def start_batch(function: RewardFunction, arguments: dict[str, Any], timeout: float | None) -> Callable[[], Any]:
    """Begin a call for the whole batch and return what waits for its result.

    Only an asynchronous function makes progress before that, so that several of them overlap. A plain function runs in
    the caller's thread unless it has a time limit.
    """
    if function.is_async:
        return _waiter(_within(lambda: function.call(**arguments), timeout), timeout)
    return lambda: _call(lambda: function.call(**arguments), timeout)


def start_samples(
    function: RewardFunction, arguments: list[dict[str, Any]], timeout: float | None
) -> Callable[[], list[Any]]:
    """Begin one call a row and return what waits for them: results in row order, an exception in a failed row's place.

    `timeout` bounds each call.
    """
    if function.is_async:
        rounds = -(-len(arguments) // function.concurrency)
        return _waiter(_gather(function, arguments, timeout), timeout, rounds)
    return lambda: _in_threads(function, arguments, timeout)


async def _gather(function: RewardFunction, arguments: list[dict[str, Any]], timeout: float | None) -> list[Any]:
    slots = asyncio.Semaphore(function.concurrency)

    async def one(keywords: dict[str, Any]) -> Any:
        async with slots:
            return await _within(lambda: function.call(**keywords), timeout)

    return await asyncio.gather(*map(one, arguments), return_exceptions=True)


def _in_threads(function: RewardFunction, arguments: list[dict[str, Any]], timeout: float | None) -> list[Any]:
    def one(keywords: dict[str, Any]) -> Any:
        try:
            return _call(lambda: function.call(**keywords), timeout)
        except Exception as error:
            return error

    pool = ThreadPoolExecutor(function.concurrency, thread_name_prefix=f"reward-{function.name}")
    try:
        return list(pool.map(one, arguments))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, do not wait for calls in progress


def _call(call: Callable[[], Any], timeout: float | None) -> Any:
    """The result of a plain call; with a time limit it runs in a thread that is abandoned when the time is up."""
    if timeout is None:
        return _awaited(call(), timeout)
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # A daemon, so that a call that never returns does not keep the process alive.
    threading.Thread(target=work, daemon=True).start()
    wait([future], timeout=timeout)
    if not future.done():
        raise CallTimeout(timeout)
    return _awaited(future.result(), timeout)


def _awaited(result: Any, timeout: float | None) -> Any:
    """The value of a coroutine that came out of a plain callable, such as a lambda around an async function."""
    return _waiter(_within(lambda: result, timeout), timeout)() if inspect.isawaitable(result) else result


async def _within(call: Callable[[], Awaitable[Any]], timeout: float | None) -> Any:
    """Await a call, cancelling it after `timeout` seconds."""
    task = asyncio.ensure_future(call())
    _, pending = await asyncio.wait({task}, timeout=timeout)
    if pending and timeout is not None:
        task.cancel()
        raise CallTimeout(timeout)
    return task.result()


def _waiter(coroutine: Any, timeout: float | None, rounds: int = 1) -> Callable[[], Any]:
    """Start a coroutine on the rewards' event loop and return what waits for its result, `rounds` calls in sequence."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _event_loop())

    def result() -> Any:
        wait([future], timeout=None if timeout is None else timeout * rounds + GRACE_SECONDS)
        if timeout is not None and not future.done():
            # The function blocks the loop instead of awaiting; later calls need one that runs.
            _event_loop.cache_clear()
            raise CallTimeout(timeout)
        return future.result()

    return result


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop all asynchronous rewards run on, in a thread of its own.

    One loop for the life of the process: clients of web services keep connections that belong to the loop they were
    opened on. A notebook's own loop is left alone.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-event-loop", daemon=True).start()
    return loop
