"""Stops a run from another process: requests it to save and stop, and waits until it has ended."""

from __future__ import annotations

import fcntl
import os
import signal
import time

from adascale_controller.local import service_file
from adascale_controller.local.local_jobs import LocalJob
from adascale_core.errors import AdaScaleError


class StopTimeoutError(AdaScaleError):
    """A run that has not ended in time."""


def stop_run(job: LocalJob, timeout: float) -> None:
    """Send SIGTERM to the run of `job` and wait until it has ended.

    A second SIGTERM would stop the run without saving. So the signal is not sent to a run that stops already,
    and two calls at once send one signal.
    """
    deadline = time.monotonic() + timeout
    process = job.require_process()
    with job.folder.stop_lock_file.open("w") as lock:
        requested = False
        while job.process == process:
            if not requested and _try_lock(lock.fileno()):
                service = service_file.read(job.folder)
                if service is None or not service.stopping:
                    _terminate(job, process)
                requested = True
            if time.monotonic() > deadline:
                raise StopTimeoutError(
                    f"job {job.short_id} has not ended within {timeout:g} s: wait longer with --timeout, or "
                    f"stop it without saving with `kill {process}`"
                )
            time.sleep(0.05)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _terminate(job: LocalJob, process: int) -> None:
    """Send SIGTERM to `process`, and to no later process with the same id."""
    if not hasattr(os, "pidfd_open"):
        os.kill(process, signal.SIGTERM)
        return
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        if job.process == process:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
