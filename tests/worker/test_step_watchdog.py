"""Tests of the watchdog over steps that do not end: which replica is behind, and where."""

import re
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from adascale_core.batch.plans import BatchPlan
from adascale_core.messages.channel import Stalled
from adascale_core.names import WAITS_FOR_OTHERS
from adascale_worker.loop.context import Context
from adascale_worker.loop.failures import Failures
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.reporting.progress import StepTimer
from support.launch import PROGRAMS, run_program

PROGRAM = PROGRAMS / "hangs.py"
LINE = next(n for n, text in enumerate(PROGRAM.read_text().splitlines(), 1) if "hangs here" in text)
PLAN = BatchPlan(1, 8, 1)


@pytest.mark.slow
def test_the_replica_that_is_behind_prints_its_stack_and_the_others_that_they_wait() -> None:
    ended = run_program(PROGRAM, replicas=2, ON_RANK=1, SECONDS=8)
    assert ended.returncode == 0, ended.stderr
    behind = (
        rf"adascale: no step for \d+ s: rank 1 is at {re.escape(str(PROGRAM))}, line {LINE}, in __getitem__\."
    )
    assert len(re.findall(behind, ended.stderr)) == 1, ended.stderr
    assert 'time.sleep(float(os.environ["SECONDS"]))  # hangs here' in ended.stderr
    waiting = rf"adascale: no step for \d+ s: rank 0 waits for the others, at {re.escape(str(PROGRAM))}"
    assert len(re.findall(waiting, ended.stderr)) == 1, ended.stderr
    assert "adascale: rank 1 continues\n" in ended.stderr
    assert ended.stdout.count("trained") == 2


@pytest.mark.slow
def test_a_step_timeout_ends_the_process_as_a_kill_from_outside_does() -> None:
    ended = run_program(PROGRAM, ON_RANK=0, SECONDS=100, ADASCALE_STEP_TIMEOUT=2)
    assert ended.returncode == -9, ended.stderr
    assert re.search(
        r"adascale: rank 0 has made no step for \d+ s, and the step timeout is 2 s: ending its process\. "
        rf"It was at {re.escape(str(PROGRAM))}, line {LINE}, in __getitem__\n",
        ended.stderr,
    )


class Observed:
    """The watchdog over the thread of the test, with the test's clock, and what it reports to the agent."""

    def __init__(self, *, inside_epoch: bool = True, replicas: int = 1) -> None:
        self.timer = StepTimer()
        self.reports: list[str] = []
        loop = ProgramLoop()
        if inside_epoch:
            loop.begin(0)
            loop.deliver()
        parts = SimpleNamespace(
            telemetry=SimpleNamespace(step_timer=self.timer),
            loop=loop,
            group=ReplicaGroup(RankAssignment(0, replicas), torch.device("cpu")),
            channel=self,
            program=mock.MagicMock(),
            progress=mock.MagicMock(),
            evaluations=mock.MagicMock(),
            departures=mock.MagicMock(find_failure=lambda _: None),
        )
        parts.program.trained.find_failure = lambda _: None
        self.watchdog = Failures(cast(Context, parts))

    def send(self, message: Stalled) -> None:
        self.reports.append(message.stall)

    def look(self, *times: float) -> list[bool]:
        """Look at some times; return for each new report whether it is a stall."""
        known = len(self.reports)
        for now in times:
            self.watchdog.look(now)
        return [report != "" for report in self.reports[known:]]


def test_a_stall_is_reported_once_and_its_end_once(capfd: pytest.CaptureFixture[str]) -> None:
    observed = Observed()
    assert observed.look(0, 29) == []
    assert observed.look(31, 40, 50) == [True]
    observed.timer.step(PLAN, 51)
    assert observed.look(52, 60) == [False]
    assert observed.reports[0].startswith(f"is at {__file__}")
    assert "adascale: no step for 31 s: rank 0 is at" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("module", "waits"),
    [
        (torch.cuda.Stream.synchronize.__module__, True),
        ("torch.distributed.distributed_c10d", True),
        ("train", False),
    ],
)
def test_a_replica_whose_gpu_waits_for_others_waits_itself(module: str, waits: bool) -> None:
    observed = Observed(replicas=2)
    function: dict[str, Any] = {"__name__": module, "look": lambda: observed.look(0, 31)}
    exec("def synchronize(): look()", function)

    def frames() -> dict[int, FrameType]:
        return {threading.get_ident(): frame_of(function["synchronize"])}

    with mock.patch.object(sys, "_current_frames", frames):
        function["synchronize"]()
    (stall,) = observed.reports
    assert (stall == WAITS_FOR_OTHERS) == waits


def frame_of(function: Any) -> FrameType:
    """The innermost frame that executes this function."""
    frame = sys._getframe()
    while frame.f_code is not function.__code__:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame


def test_nothing_is_reported_outside_of_the_data_loop() -> None:
    observed = Observed(inside_epoch=False)
    assert observed.look(0, 1000) == []
    observed.timer.step(PLAN, 1000)
    observed.timer.pause()
    assert observed.look(1001, 3000) == []


def test_the_time_is_compared_with_that_of_slow_steps() -> None:
    observed = Observed()
    for now in (0, 20, 40, 60):
        observed.timer.step(PLAN, now)
    assert observed.look(60, 200) == []
    assert observed.look(270) == [True]
