"""Metrics of the operator, served as its pod does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from adascale_controller.operator.runtime.health import Health, OperatorMetrics
from support.launch import free_port


def show_a_started_job(metrics: OperatorMetrics) -> bool:
    """Whether a job was started, in a cycle that has ended, and nothing is left to do."""
    lines = metrics.text().decode().splitlines()
    is_started = 'adascale_operator_allocations_total{change="grow"} 1.0' in lines
    is_ended = "adascale_operator_cycle_duration_seconds_count 0.0" not in lines
    return is_started and is_ended and "adascale_operator_pending_jobs 0.0" in lines


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
