"""The program of `members.py`, whose replica 0 is killed after it has sent a part of its state."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from adascale_worker.membership.process_group import ReplicaGroup

SENT = 5
"""Messages: the length of the structure, the structure, and three with tensors."""

send, sent = ReplicaGroup.send, 0


def send_some(group: ReplicaGroup, *arguments: Any) -> Any:
    global sent
    if sent == SENT:
        os.kill(os.getpid(), signal.SIGKILL)
    sent += 1
    return send(group, *arguments)


if os.environ["REPLICA"] == "0":
    ReplicaGroup.send = send_some  # type: ignore[method-assign, assignment]
runpy.run_path(str(Path(__file__).with_name("members.py")), run_name="__main__")
