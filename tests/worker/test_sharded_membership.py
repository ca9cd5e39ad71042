"""Changes of the replicas if each has several processes that share one copy of the model."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.members import Members

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "sharded_members.py"
ELASTIC = json.dumps({"batch_size": 12, "max_batch_size": 48, "local_bsz_bounds": [2, 12]})
OPTIONS = {"PROGRAM": PROGRAM, "ADASCALE_PROCESSES_PER_REPLICA": 2, "EPOCHS": 6, "STEP_SECONDS": 0.01}


def test_survivors_stay_in_their_processes_when_replicas_join_and_leave(
    make_members: Callable[..., Members],
) -> None:
    job = make_members(**{**OPTIONS, "BOUNDS": ELASTIC, "EPOCHS": 15})
    trainers = job.start(3)
    for count in (1, 2, 3, 2):
        job.activate(trainers[:count])
        job.wait_step(job.last_step() + 5)
    assert len(job.finish()) == 1
    job.require_complete_stream()
    assert {record["replicas"] for record in job.records()} == {1, 2, 3}
    by_step: dict[int, set[tuple[float, float, float]]] = {}
    for record in job.records():
        found = (record["gain"], record["progress"], record["lr"])
        by_step.setdefault(record["step"], set()).add(found)
    assert all(len(found) == 1 for found in by_step.values()), "all processes have the same gain"


SLOW = [
    (0, 0, signal.SIGKILL),
    (1, 0, signal.SIGKILL),
    (1, 1, signal.SIGKILL),
    (0, 0, signal.SIGSTOP),
    (1, 1, signal.SIGSTOP),
]


@pytest.mark.parametrize(
    ("victim", "process", "number"),
    [
        (0, 1, signal.SIGKILL),
        (0, 1, signal.SIGSTOP),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_a_killed_or_frozen_process_costs_no_step_and_no_bit(
    make_members: Callable[..., Members], victim: int, process: int, number: signal.Signals
) -> None:
    calm = make_members("calm", **OPTIONS)
    calm.activate(calm.start(2))
    expected = calm.finish()
    assert len(expected) == 1
    job = make_members("killed", **OPTIONS, ADASCALE_PEER_TIMEOUT=3)
    *members, spare = job.start(3)
    job.activate(members)
    job.wait_step(job.last_step() + random.Random(2 * victim + process).randint(1, 4))
    lost = members.pop(victim)
    lost.kill(number, process=process)
    job.wait_holding(members)
    job.activate([*members, spare])
    assert job.finish() == expected
    assert all(trainer.code == 0 for trainer in members), "they stay in their processes"
    assert job.require_complete_stream() == calm.require_complete_stream()
