"""The program of `members.py`, whose replica DIES is killed when the end of training is saved."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from adascale_worker.state.state import State

save = State.save


def die(state: State, **options: Any) -> None:
    if options.get("final"):
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, **options)


if os.environ["REPLICA"] == os.environ["DIES"]:
    State.save = die  # type: ignore[method-assign, assignment]
runpy.run_path(str(Path(__file__).with_name("members.py")), run_name="__main__")
