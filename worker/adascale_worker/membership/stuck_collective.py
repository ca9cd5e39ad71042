"""Saves the state and ends the process if its main thread stays in a collective call that has failed.

When a peer is lost, the sockets of gloo are shut down, and the collective call that waits there raises an
error. There is one wait that gloo does not end: the peer's permission to send arrives just before the sockets
are shut down, the send fails, and nothing reports that to the thread which waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from adascale_core.failures import EXIT_PEER_LOST, EXIT_REENTRY

POLL_INTERVAL: Final = 0.5
"""Seconds between two looks at the main thread."""
LOOKS: Final = 10
"""How often in succession the main thread must be found waiting at the same place. Looks are counted, because
time passes also while the process is frozen."""
_MAX_CPU_TIME: Final = 0.01
"""Seconds of processor time between two looks, below which a thread waits."""
_MODULES: Final = (
    "torch.autograd",
    "torch.distributed",
    "torch.nn.parallel",
    "adascale_worker.membership.process_group",
    "adascale_worker.scaling.statistics",
)
"""Modules whose functions call collectives. The checkpoint, which waits for a disk, is not among them."""
_DEVICE_MODULES: Final = ("torch.cuda.streams",)
"""Modules whose functions wait for the kernels of a GPU, of which one may wait for a lost peer. CUDA may use
the processor while it waits."""


def watch(has_ended: Callable[[], bool], save: Callable[[], bool]) -> None:
    """Start a thread that ends the process if the main thread waits in a collective call and stays there."""
    name = "adascale-stuck-collective"
    threading.Thread(target=_watch, args=(has_ended, save), name=name, daemon=True).start()


def _watch(has_ended: Callable[[], bool], save: Callable[[], bool]) -> None:
    main = threading.main_thread()
    if main.ident is None:
        return
    clock = time.pthread_getcpuclockid(main.ident)
    pid, before, looks = os.getpid(), None, 0
    while main.is_alive() and not has_ended() and os.getpid() == pid:
        used = time.clock_gettime(clock)
        frame = sys._current_frames().get(main.ident)
        module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        place: object = None
        if module in _DEVICE_MODULES:
            # While it is kept, no later call has the same frame. It has no tensors.
            place = frame
        elif frame is not None and module.startswith(_MODULES):
            place = id(frame), frame.f_lasti
        is_idle = before is not None and used - before[1] < _MAX_CPU_TIME
        waits = before is not None and before[0] == place and (is_idle or module in _DEVICE_MODULES)
        looks = looks + 1 if place is not None and waits else 0
        if looks >= LOOKS:
            _end_process(save)
        before = place, used
        del frame
        time.sleep(POLL_INTERVAL)


def _end_process(save: Callable[[], bool]) -> None:
    sys.stderr.write(
        f"adascale: a peer was lost, and the collective call that waited for it has not ended within "
        f"{LOOKS * POLL_INTERVAL:g} s: ending this process, so that another one joins the others\n"
    )
    code = EXIT_PEER_LOST
    try:
        if save():
            code = EXIT_REENTRY
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        # The main thread does not return to Python.
        os._exit(code)
