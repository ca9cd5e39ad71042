"""Changes of the replicas if each has several processes that share one copy of the model."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adascale_worker.membership.process_group import ReplicaGroup, ReplicaProcesses
from adascale_worker.process.environment import RankAssignment
from support.launch import PROGRAMS
from support.members import Members

PROGRAM = PROGRAMS / "sharded_members.py"
ELASTIC = json.dumps({"batch_size": 12, "max_batch_size": 48, "local_bsz_bounds": [2, 12]})
OPTIONS = {"PROGRAM": PROGRAM, "ADASCALE_PROCESSES_PER_REPLICA": 2, "EPOCHS": 3}


@pytest.mark.slow
def test_survivors_stay_in_their_processes_when_replicas_join_and_leave(
    make_members: Callable[..., Members],
) -> None:
    job = make_members(**{**OPTIONS, "BOUNDS": ELASTIC, "EPOCHS": 15, "STEP_SECONDS": 0.01})
    trainers = job.start(3)
    for count in (1, 3, 2):
        job.train(trainers[:count], 5)
    assert len(job.finish()) == 1
    job.require_complete_stream()
    assert {record["replicas"] for record in job.records()} == {1, 2, 3}
    by_step: dict[int, set[tuple[float, float, float]]] = {}
    for record in job.records():
        found = (record["gain"], record["progress"], record["lr"])
        by_step.setdefault(record["step"], set()).add(found)
    assert all(len(found) == 1 for found in by_step.values()), "all processes have the same gain"


@pytest.mark.parametrize(
    ("victim", "process", "number"),
    [
        (0, 1, signal.SIGKILL),
        pytest.param(1, 0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_killed_or_frozen_process_costs_no_step_and_no_bit(
    make_members: Callable[..., Members], victim: int, process: int, number: signal.Signals
) -> None:
    calm = make_members("calm", **OPTIONS)
    expected = calm.complete(2)
    assert len(expected) == 1
    job = make_members("killed", **OPTIONS, STEP_SECONDS=0.05, ADASCALE_PEER_TIMEOUT=3)
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


LARGE = {**OPTIONS, "EPOCHS": 5, "WIDTH": 50_000, "STEP_SECONDS": 0.1}


def test_each_process_of_a_replica_that_joins_gets_its_part_while_the_others_train(
    make_members: Callable[..., Members],
) -> None:
    job = make_members(**LARGE)
    first, joining = job.start(2)
    job.train([first], 3)
    job.train([first, joining], 3)
    assert "of 18 large tensors, 18 were received while" in joining.output.read_text()


@pytest.mark.parametrize("lost", [0, 1])
def test_each_process_of_a_spare_has_its_part_when_it_takes_the_place_of_a_lost_member(
    make_members: Callable[..., Members], lost: int
) -> None:
    calm = make_members("calm", **LARGE)
    expected = calm.complete(2)
    job = make_members("killed", **LARGE)
    spare = job.replace_by_spare(lost)
    assert job.finish() == expected
    assert job.require_complete_stream() == calm.require_complete_stream()
    assert "of 18 large tensors, 18 were received while" in spare.output.read_text()


HOST = torch.device("cpu")


def test_a_thread_beside_the_main_one_reads_what_others_have_announced() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    groups = [ReplicaGroup(RankAssignment(rank, 2), HOST, ReplicaProcesses(0, 1, HOST)) for rank in (0, 1)]
    groups[0].form_replica_at(None)
    try:
        for group in groups:
            group._store, group._number = store, 0
        groups[1].announce("left", "step 3")
        with ThreadPoolExecutor() as thread:
            assert thread.submit(groups[0].announced, "left").result() == {1: "step 3"}
    finally:
        groups[0].close()
