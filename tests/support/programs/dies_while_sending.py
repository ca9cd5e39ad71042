"""The program of `members.py`, whose replica DIES is killed while the state goes from replica 0 to another.

WHILE is what it does then: it has sent a part of the "whole" state, for which the other waits; or it has sent
or received a "piece" or the "rest" of it while replica 0 trains.
"""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state import following, transfer
from adascale_worker.state.following import StateFollower, StateSource

SENT = 5
"""Messages: the length of the structure, the structure, and three with tensors."""
METHODS: dict[str, tuple[Any, str, int]] = {
    "whole 0": (ReplicaGroup, "send", SENT),
    "piece 0": (StateSource, "flush", 0),
    "rest 0": (transfer, "checksum", 0),
    "piece 1": (StateFollower, "_step", 0),
    "rest 1": (transfer, "checksum", 0),
}


def fail(*_: Any) -> None:
    raise OSError("the test lets it fail")


following.LEAST_WAIT = 60.0  # type: ignore[misc]
place = f"{os.environ.get('WHILE', 'whole')} {os.environ.get('DIES', '0')}"
if place == "whole 0":
    StateSource._before_step = fail  # type: ignore[assignment]
if os.environ["REPLICA"] == os.environ.get("DIES", "0"):
    owner, name, limit = METHODS[place]
    method, calls = getattr(owner, name), 0

    def some(*arguments: Any, **named: Any) -> Any:
        global calls
        if calls == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return method(*arguments, **named)

    setattr(owner, name, some)
runpy.run_path(str(Path(__file__).with_name("members.py")), run_name="__main__")
