"""Sends reports to a tracker from a background thread, so that no training step waits for it."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from adascale_core.messages.reports import GainReport
from adascale_worker.reporting.trackers import Tracker

MAX_QUEUED = 1000
"""Reports that are queued while the tracker does not answer; further ones are dropped."""


class RunIdentity:
    """The id of the job's run in a tracker, a part of the state of training."""

    def __init__(self, identity: str | None = None) -> None:
        self.id = identity or secrets.token_hex(8)

    def state_dict(self) -> Any:
        """Return the id."""
        return self.id

    def load_state_dict(self, state: Any) -> None:
        """Continue the run of the job whose state is restored."""
        self.id = state


class TrackedRun:
    """A run in a tracker, as long as this replica is rank 0."""

    def __init__(self, tracker: Tracker, run: str) -> None:
        self._tracker = tracker
        self._run = run
        self._queue: queue.Queue[GainReport | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._send, name="adascale-tracker", daemon=True)
        self._thread.start()

    def report(self, report: GainReport) -> None:
        """Queue a report. Does not wait for the tracker."""
        # It is full if the tracker does not answer; its thread prints why when the call fails.
        with suppress(queue.Full):
            self._queue.put_nowait(report)

    def close(self, timeout: float = 10.0) -> None:
        """Send what is queued, and close the run. May be called again."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return
            self._thread.join(timeout)

    def _send(self) -> None:
        has_begun, step = False, -1
        sent: set[str] = set()
        try:
            while (report := self._queue.get()) is not None:
                if not has_begun:
                    self._tracker.begin(self._run, report.step, report.progress)
                    has_begun = True
                # The last report of a job is of the same step as the one before: a step has one value.
                values = tracked_values(report)
                if report.step == step:
                    values = {name: value for name, value in values.items() if name not in sent}
                if values:
                    self._tracker.log(values, report.step, report.progress)
                step, sent = report.step, set(values) | (sent if report.step == step else set())
            if has_begun:
                self._tracker.close()
        except Exception as error:  # noqa: BLE001
            # What a tracker raises is not known, and training must not end by it.
            print(
                f"adascale: {type(self._tracker).__name__} has failed: {type(error).__name__}: {error}; "
                "training continues without the tracker",
                flush=True,
            )
            while self._queue.get() is not None:
                pass


def tracked_values(report: GainReport) -> Mapping[str, float]:
    """Return what a tracker records of a report: what the program has logged, and what AdaScale measures."""
    measured: dict[str, float | None] = {
        "loss": report.loss,
        **report.metrics,
        "adascale/gain": report.gain,
        "adascale/efficiency": report.efficiency,
        "adascale/replicas": report.replicas,
        "adascale/batch_size": report.replicas * report.local_bsz * report.accumulation,
        "adascale/learning_rate": report.lr,
        "adascale/goodput": report.goodput,
    }
    return {name: value for name, value in measured.items() if value is not None}
