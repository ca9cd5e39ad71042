"""Serves metrics of the operator as its pod does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from adascale_controller.operator.runtime.health import Health, OperatorMetrics
from support.launch import free_port


@contextmanager
def serve(metrics: OperatorMetrics) -> Iterator[int]:
    """Serve metrics at the port that it returns."""
    port, loop = free_port(), asyncio.new_event_loop()
    ready, ended = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with Health(metrics).serve(f"127.0.0.1:{port}"):
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(30)
        yield port
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()
