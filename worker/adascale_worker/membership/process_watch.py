"""Notices that another process of a replica is frozen, and ends this one, so that the replica starts again.

What is killed ends the replica at once, because the agent waits for its processes. One that is frozen keeps
its connections open, and the others wait for it in the collective calls of FSDP.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from adascale_core.failures import EXIT_PEER_LOST

LOOKS: Final = 10
"""How often in succession a process must show no sign of life. Looks are counted, because time passes also
while the one that looks is frozen."""


class ProcessWatch:
    """Shows the other processes of a replica that this one runs, and looks whether they do.

    Each has a file, whose time of modification it changes. The file exists from `start` to `stop`.
    """

    def __init__(
        self, path: str, process: int, count: int, timeout: float, end: Callable[[int], None] | None = None
    ) -> None:
        self._files = [Path(f"{path}-{index}") for index in range(count)]
        self._own = self._files[process]
        self._others = [index for index in range(count) if index != process]
        self._timeout = timeout
        self._end = self._end_process if end is None else end
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adascale-process-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._own.touch()
        self._thread.start()

    def stop(self) -> None:
        """Do not look any more: this process ends, or does not need the others. May be called again."""
        self._is_stopped.set()
        self._own.unlink(missing_ok=True)

    def _run(self) -> None:
        seen: dict[int, tuple[int, int]] = {}
        while not self._is_stopped.wait(self._timeout / LOOKS):
            # Without the file, the agent has ended, or this process is about to.
            with contextlib.suppress(OSError):
                os.utime(self._own)
            for other in self._others:
                try:
                    changed = self._files[other].stat().st_mtime_ns
                except OSError:
                    seen.pop(other, None)  # It has not begun, or has stopped.
                    continue
                before, looks = seen.get(other, (changed, 0))
                seen[other] = changed, looks + 1 if changed == before else 0
                if seen[other][1] > LOOKS:
                    self._end(other)
                    return

    def _end_process(self, other: int) -> None:
        sys.stderr.write(
            f"adascale: process {other} of this replica has shown no sign of life for {self._timeout:g} s: "
            "ending the replica, so that another one joins the others\n"
        )
        sys.stderr.flush()
        sys.stdout.flush()
        # The main thread waits for the other process.
        os._exit(EXIT_PEER_LOST)
