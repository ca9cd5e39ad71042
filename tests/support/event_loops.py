"""Event loops: one in virtual time, in which a sleep takes no time, and one without threads."""

from __future__ import annotations

import asyncio
import atexit
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances without waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_ImmediateSelector(self))

    def time(self) -> float:
        return self.now


class _ImmediateSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "all tasks wait without a timeout"
        # Each turn takes a moment: otherwise the rest of a wait can be smaller than the resolution of the
        # clock, and the wait never ends.
        self._loop.now += max(timeout, 1e-6)
        return super().select(0)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in virtual time. Returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:

    @wraps(test)
    def run_test(*arguments: P.args, **fixtures: P.kwargs) -> None:
        run(lambda: test(*arguments, **fixtures))

    return run_test


def now() -> float:
    """Return the seconds of virtual time."""
    return asyncio.get_running_loop().time()


class _InlineExecutor(ThreadPoolExecutor):
    """Runs each call at once."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Run a call. Returns its result."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments, **options))
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)
        return done


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop without threads."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_InlineExecutor())
    return loop


_RUNNER = asyncio.Runner(loop_factory=_new_loop)
"""The same for all coroutines: a loop for each cycle of an operator would take most of the time."""
atexit.register(_RUNNER.close)


def run_without_threads(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, and cancel the tasks that it leaves."""
    loop = _RUNNER.get_loop()
    try:
        _RUNNER.run(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
