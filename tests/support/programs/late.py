"""The program `members.py`, in which one replica is late: it waits before it reads the sums of a step.

Environment, besides that of the program: LATE_REPLICA, which replica waits, before it makes its step number
LATE_AT, for which the other replicas have all they need; LATE_FAILS, 1 if the wait ends with an error, as if
the connection had been closed before the last message arrived. It makes a file `late` in the folder of the
journal, and waits for a file `release`.
"""

import os
import runpy
import time
from pathlib import Path

from adascale_worker.loop import steps as loop_steps
from adascale_worker.scaling.statistics.all_reduce import StatisticsAllReduce

# In most steps, no replica waits for the others after it has made the step.
loop_steps.AGREEMENT_INTERVAL = 1e6
folder = Path(os.environ["JOURNAL"])
wait = StatisticsAllReduce.wait
steps = 0


def wait_late(all_reduce: StatisticsAllReduce) -> None:
    global steps
    steps += all_reduce._work is not None
    if steps < int(os.environ["LATE_AT"]):
        wait(all_reduce)
        return
    StatisticsAllReduce.wait = wait  # type: ignore[method-assign]
    wait(all_reduce)
    (folder / "late").touch()
    while not (folder / "release").exists():
        time.sleep(0.01)
    if os.environ["LATE_FAILS"] == "1":
        raise RuntimeError("[gloo] Connection closed by peer")


if os.environ["REPLICA"] == os.environ["LATE_REPLICA"]:
    StatisticsAllReduce.wait = wait_late  # type: ignore[method-assign, assignment]
runpy.run_path(str(Path(__file__).with_name("members.py")), run_name="__main__")
