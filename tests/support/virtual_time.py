"""Runs coroutines in virtual time: a sleep takes no time, and moves the clock of the loop."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
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
