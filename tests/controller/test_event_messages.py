"""Messages about losses, generations and stalls."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen

import pytest
from rich.console import Console

from adascale_controller.job.phase import describe_loss
from adascale_controller.local.control_loop import LOSS_TIMEOUT, STALL_TIMEOUT, EventMessages
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.replicas import Agents, Replicas
from adascale_controller.local.state_dir import StateDir
from adascale_core.failures import EXIT_PEER_LOST
from adascale_core.messages.allocation import ActiveAllocation, SlowReplacement
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import JobView, ReplicaView
from support.definitions import define
from support.observed_jobs import SPEC

REPORT = GainReport(
    generation=2, step=10, progress=10.0, epoch=0, replicas=2, local_bsz=4, accumulation=3, scale=6.0,
    gain=4.0, grad_sqr=0.1, grad_var=0.9, step_time=0.01, time=100.0, loss=0.5,
)  # fmt: skip
VIEW = replace(JobView.empty("default.digits"), latest=REPORT)
TRAINING = replace(VIEW, active=ActiveAllocation(2, 2))


@dataclass
class Recorded:
    """Event messages whose output is recorded; the state folder may have a log of replica 0."""

    folder: StateDir
    output: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        display = PlainDisplay(Console(file=self.output, width=200))
        self.agents = agents = Agents(LocalCommand((), {}, self.folder.path), {}, [], self.folder, lock=-1)
        self.events = EventMessages(
            Replicas(agents, define("default.digits", SPEC), display), display, now=0.0
        )

    @property
    def messages(self) -> list[str]:
        return [
            line.split("  ", 2)[-1].removeprefix("0:00  ") for line in self.output.getvalue().splitlines()
        ]


def running(rank: int, stall: str) -> ReplicaView:
    registration = Registration(rank, "first", ReplicaState.RUNNING, 1, "127.0.0.1", 1, stall=stall)
    return ReplicaView.of(registration, 0.0)


def recorded(path: Path) -> Recorded:
    folder = StateDir(path)
    folder.create()
    return Recorded(folder)


def lost(rank: int, exit_code: int, generation: int = 1) -> ReplicaView:
    registration = Registration(rank, "first", ReplicaState.LOST, generation, "127.0.0.1", 1, exit_code)
    return ReplicaView.of(registration, 0.0)


def test_a_loss_is_reported_with_the_exit_code_of_the_lost_replica(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.events.report_losses(TRAINING, 1.0)
    run.events.report_losses(replace(TRAINING, disruptions=1, replicas=(lost(1, EXIT_PEER_LOST),)), 2.0)
    assert run.messages == []
    view = replace(TRAINING, disruptions=1, replicas=(lost(0, -9), lost(1, EXIT_PEER_LOST)))
    run.events.report_losses(view, 2.1)
    run.events.report_losses(view, 2.2)
    assert run.messages == ["The trainer of replica 0 was lost (killed by SIGKILL); restarting it"]


@pytest.mark.parametrize(
    ("broken", "generations", "message"),
    [
        (False, (1, 2), "The trainer of replica 1 was lost (killed by SIGKILL)"),
        (False, (2, 1), "The trainer of replica 0 was lost (exit code 70)"),
        (True, (1, 3), "The trainer of replica 1 was lost (killed by SIGKILL)"),
        (True, (1, 2), None),
    ],
)
def test_of_several_losses_the_newest_is_described(
    *, broken: bool, generations: tuple[int, int], message: str | None
) -> None:
    replicas = (lost(0, 70, generations[0]), lost(1, -9, generations[1]))
    view = replace(VIEW, active=ActiveAllocation(3, 2), broken=broken, replicas=replicas)
    assert describe_loss(view) == message


def test_a_loss_without_an_exit_code_is_reported_after_a_timeout(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.events.report_losses(replace(VIEW, active=ActiveAllocation(2, 1)), 1.0)
    # The only replica is there again when its loss is seen.
    again = replace(TRAINING, disruptions=1, active=ActiveAllocation(3, 1), replicas=(running(0, ""),))
    run.events.report_losses(again, 2.0)
    run.events.report_losses(again, 2.1 + LOSS_TIMEOUT)
    assert run.messages == ["A replica was lost; restarting it"]


def test_the_warnings_of_the_trainers_are_shown_once_and_whole(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    with run.folder.replica_log(0).open("a") as log:
        log.write("adascale: of an earlier run\n")
        log.flush()
        for rank in range(2):
            run.agents.messages.follow(run.folder.replica_log(rank))
        log.write("epoch 1\nadascale: T_max is 750 in the checkpoint\n/a/train.py:4: RuntimeWarning: no st")
        log.flush()
        run.events.report_messages()
        log.write("ep was made\n  for x, y in loader:\nadascale: step 64: replica 1 is slow\n")
    run.folder.replica_log(1).write_text("adascale: T_max is 750 in the checkpoint\n")
    for now in (1.0, STALL_TIMEOUT + 1.1):
        run.events.report_messages()
        run.events.report_stall(VIEW, now)
    assert run.messages == [
        "T_max is 750 in the checkpoint",
        "no step was made (/a/train.py:4)",
        "No step for 35 s; the last output of replica 0 is: adascale: step 64: replica 1 is slow",
    ]
    run.folder.replica_log(0).write_text("t.py:4: RuntimeWarning: no step\n  for x, y in loader:\n")
    run.events.report_stall(replace(VIEW, latest=replace(REPORT, step=11)), 100.0)
    run.events.report_stall(replace(VIEW, latest=replace(REPORT, step=11)), 101.0 + STALL_TIMEOUT)
    assert run.messages[-1] == "No step for 35 s"


def test_losses_before_the_run_are_not_reported(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.events.first_generation = 2
    before = replace(TRAINING, active=ActiveAllocation(1, 2), disruptions=2)
    for view, now in (
        (before, 1.0),
        (replace(TRAINING, disruptions=3), 2.0),
        (replace(TRAINING, disruptions=3), 10.0),
    ):
        run.events.report_losses(view, now)
    assert run.messages == []


def test_a_generation_is_reported_with_its_batch_and_downtime(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.events.report_generation(REPORT, None)
    run.events.report_generation(replace(REPORT, accumulation=1), 1.25)
    assert run.messages == [
        "Generation 2 trains on 2 replicas: batch size 24, local batch 4, accumulation 3, scale 6",
        "Generation 2 trains on 2 replicas: batch size 8, local batch 4, scale 6, downtime 1.2 s",
    ]


def test_a_stall_is_reported_once_with_the_last_output(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.folder.replica_log(0).write_text("loading data\nwaiting for a lock\n")
    for now in (1.0, STALL_TIMEOUT, STALL_TIMEOUT + 1.1, 2 * STALL_TIMEOUT + 2):
        run.events.report_stall(VIEW, now)
    assert run.messages == ["No step for 35 s; the last output of replica 0 is: waiting for a lock"]
    run.events.report_stall(replace(VIEW, latest=replace(REPORT, step=11)), 100.0)
    run.events.report_stall(replace(VIEW, latest=replace(REPORT, step=11)), 101.0 + STALL_TIMEOUT)
    assert len(run.messages) == 2


def test_a_stall_names_the_replica_that_is_behind(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    stalls = ("waits for the others", "is at train.py, line 41, in load")
    replicas = (running(index, stall) for index, stall in enumerate(stalls))
    view = replace(VIEW, replicas=tuple(replicas))
    for now in (1.0, STALL_TIMEOUT + 1.1):
        run.events.report_stall(view, now)
    assert run.messages == [
        "No step for 35 s: replica 1 is at train.py, line 41, in load; replica 0 waits for the others. The "
        "log of a replica that is behind has its stack"
    ]


def test_a_loss_that_others_survive_costs_no_state(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    run.events.report_losses(TRAINING, 1.0)
    held = replace(lost(1, 0).registration, state=ReplicaState.HOLDING, step=5, exit_code=None)
    replicas = (lost(0, -9), ReplicaView.of(held, 0.0))
    run.events.report_losses(replace(TRAINING, disruptions=1, replicas=replicas), 2.0)
    assert run.messages == [
        "The trainer of replica 0 was lost (killed by SIGKILL); the others keep their state"
    ]


def test_a_slow_replica_is_reported_once_and_again_if_it_is_another_one(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    view = replace(VIEW, active=ActiveAllocation(2, 2))
    for slow, factor in ((None, None), (1, 1.25), (1, 1.3), (0, 1.2), (None, None)):
        run.events.report_slow(replace(view, latest=replace(REPORT, slow_replica=slow, slow_factor=factor)))
    # This report is of the replicas before.
    run.events.report_slow(
        replace(view, latest=replace(REPORT, generation=1, slow_replica=1, slow_factor=1.5))
    )
    assert run.messages == [
        f"Replica {slow} is slow: in each step it computes {factor} times as long as the others, which wait "
        "for it"
        for slow, factor in ((1, "1.25"), (0, "1.20"))
    ]


def test_processes_that_share_cores_are_named_once_as_the_cause_of_slow_replicas(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    view = replace(VIEW, active=ActiveAllocation(2, 2))
    core = {min(os.sched_getaffinity(0))}
    command = [sys.executable, "-c", "while True: pass"]
    busy = [Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, core)) for _ in range(2)]
    replicas = tuple(replace(running(rank, ""), pid=each.pid) for rank, each in enumerate(busy))
    try:
        for slow in (1, 0, 1):
            latest = replace(REPORT, slow_replica=slow, slow_factor=1.5)
            run.events.report_slow(replace(view, latest=latest, replicas=replicas))
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert len(run.messages) == 1
    assert "Replica 1 is slow because more processes compute than this machine has cores" in run.messages[0]


def test_a_spare_in_the_place_of_a_slow_replica_is_reported_once(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    replaced = ActiveAllocation(2, 2, slow_replacement=SlowReplacement(1, "a.1", "n1", 1.3, 2))
    for active, broken in (
        (ActiveAllocation(1, 2), False),
        (replaced, False),
        (replaced, False),
        (replaced, True),
    ):
        run.events.report_slow(replace(VIEW, active=active, broken=broken))
    assert run.messages == [
        "Replica 1 on node n1 was slow, it computed 1.30 times as long as the others: replica 2, a spare, "
        "trains in its place"
    ]
