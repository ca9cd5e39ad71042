"""The program of `members.py`, whose replica DIES is killed when the end of training is saved."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from adascale_worker.state.saving import StateSaving

save = StateSaving.save


def die(saving: StateSaving, **options: Any) -> None:
    if options.get("final"):
        os.kill(os.getpid(), signal.SIGKILL)
    save(saving, **options)


if os.environ["REPLICA"] == os.environ["DIES"]:
    StateSaving.save = die  # type: ignore[method-assign, assignment]
runpy.run_path(str(Path(__file__).with_name("members.py")), run_name="__main__")
