"""An event loop for many short runs, which starts no threads: what is given to a thread is done at once."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class InlineExecutor(ThreadPoolExecutor):
    """Runs each call at once, so that a cycle starts no threads."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Run a call. Returns its result."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments, **options))
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)
        return done


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop without threads."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(InlineExecutor())
    return loop


RUNNER = asyncio.Runner(loop_factory=new_loop)
"""The same for all cycles: a loop for each would take most of the time."""
atexit.register(RUNNER.close)


def run_inline(cycle: Coroutine[Any, Any, None]) -> None:
    """Run a cycle of an operator, and cancel the tasks that it leaves."""
    loop = RUNNER.get_loop()
    try:
        RUNNER.run(cycle)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
