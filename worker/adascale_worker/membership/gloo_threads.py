"""Waiting for the threads of torch's process groups on the CPU, before the interpreter is finalized.

Such a thread can still hold tensors of the last collective when the caller has its result, and needs the GIL
to release them. A thread that asks for the GIL during finalization aborts the process ("terminate called
without an active exception", github.com/pytorch/pytorch/pull/179291).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

NAME = "pt_gloo_runloop"
"""What torch names the threads that execute collectives of Gloo."""
IDLE_TIME = 0.02
"""Seconds without the GIL in which a thread that does not run has nothing left to do: one that waits for the
GIL tries to take it every 5 ms (`sys.getswitchinterval`)."""
TIMEOUT = 10.0
"""Seconds to wait at most for threads that always run."""

_TASKS = Path("/proc/self/task")


def wait_until_idle(name: str = NAME) -> None:
    """Wait until each thread with this name has nothing to do or is blocked, `TIMEOUT` at most.

    Without /proc, wait for `IDLE_TIME`.
    """
    deadline = time.monotonic() + TIMEOUT
    before = _activity(name)
    while before or not _TASKS.exists():
        time.sleep(IDLE_TIME)
        after = _activity(name)
        is_idle = after == before and all(state != "R" for state, _ in after.values())
        if is_idle or time.monotonic() > deadline:
            return
        before = after


def _activity(name: str) -> dict[str, tuple[str, str]]:
    """Return the state, and the number of times that it has waited, of each thread with this name."""
    found = {}
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text().strip() != name:
                    continue
                status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                found[task.name] = (status["State"].split()[0], status["voluntary_ctxt_switches"].strip())
    return found
