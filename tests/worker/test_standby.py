"""The trainer that an agent prepares for the next generation, with other programs as trainers."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from adascale_core.messages import Allocation
from adascale_worker.agent import standby
from adascale_worker.agent.standby import StandbyTrainer
from adascale_worker.agent.trainer_process import TrainerProcess
from support.launch import wait_until

READY = "import os, time; os.write(int(os.environ['ADASCALE_AGENT_FD']), b'!'); time.sleep(1000)"


class Started(list[TrainerProcess]):
    """The trainers that were started, each with the command of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.command = ["sleep", "1000"]

    def __call__(self) -> TrainerProcess:
        self.append(TrainerProcess(self.command, os.environ, None, on_change=lambda: None))
        return self[-1]


@pytest.fixture
def started() -> Iterator[Started]:
    trainers = Started()
    yield trainers
    for trainer in trainers:
        trainer.kill()


def has_exited(trainer: TrainerProcess) -> Callable[[], bool]:
    return lambda: trainer.exit_code is not None


def test_a_trainer_is_started_once_for_each_desired_generation_that_includes_the_replica(
    started: Started,
) -> None:
    trainer = StandbyTrainer(started)
    trainer.update(None, rank=1, present=0)
    trainer.update(Allocation(1, 1), rank=1, present=0)
    assert len(started) == 0
    for _ in range(2):
        trainer.update(Allocation(2, 2), rank=1, present=0)
    assert len(started) == 1
    assert trainer.take(2) is started[0]
    trainer.update(Allocation(2, 2), rank=1, present=2)
    assert len(started) == 1, "generation 2 has its trainer"
    trainer.update(Allocation(3, 2), rank=1, present=2)
    assert len(started) == 2


def test_a_replica_is_prepared_when_its_trainer_is_ready(started: Started) -> None:
    started.command = [sys.executable, "-c", READY]
    trainer = StandbyTrainer(started)
    assert trainer.is_prepared, "nothing is to be prepared"
    trainer.update(Allocation(1, 1), rank=0, present=0)
    wait_until(lambda: trainer.is_prepared, "the report")
    assert started[0].ready


def test_a_trainer_that_does_not_report_counts_as_prepared_after_a_timeout(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = StandbyTrainer(started)
    trainer.update(Allocation(1, 1), rank=0, present=0)
    assert not trainer.is_prepared
    monkeypatch.setattr(standby, "PREPARATION_TIMEOUT", 0.0)
    assert trainer.is_prepared


def test_a_trainer_that_exits_is_returned_and_not_started_again(started: Started) -> None:
    started.command = ["sh", "-c", "exit 3"]
    trainer = StandbyTrainer(started)
    trainer.update(Allocation(1, 1), rank=0, present=0)
    wait_until(has_exited(started[0]), "the exit")
    assert trainer.update(Allocation(1, 1), rank=0, present=0) is started[0]
    assert trainer.update(Allocation(1, 1), rank=0, present=0) is None
    assert len(started) == 1


def test_a_trainer_that_is_killed_is_started_again(started: Started) -> None:
    trainer = StandbyTrainer(started)
    trainer.update(Allocation(1, 1), rank=0, present=0)
    started[0].send_signal(signal.SIGKILL)
    wait_until(has_exited(started[0]), "the exit")
    assert trainer.update(Allocation(1, 1), rank=0, present=0) is None
    trainer.update(Allocation(1, 1), rank=0, present=0)
    assert len(started) == 2


def test_a_trainer_whose_generation_does_not_become_active_is_killed(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = StandbyTrainer(started)
    trainer.update(Allocation(1, 1), rank=0, present=0)
    monkeypatch.setattr(standby, "STANDBY_TIMEOUT", 0.0)
    trainer.update(Allocation(1, 1), rank=0, present=0)
    wait_until(has_exited(started[0]), "the exit")
    trainer.update(Allocation(1, 1), rank=0, present=0)
    assert len(started) == 1, "not again for the same generation"


def test_a_restart_replaces_the_trainer_for_any_newer_generation(started: Started) -> None:
    trainer = StandbyTrainer(started)
    trainer.update(Allocation(3, 1), rank=0, present=1)
    trainer.restart_after(1)
    wait_until(has_exited(started[0]), "the exit")
    trainer.update(Allocation(3, 1), rank=0, present=1)
    assert len(started) == 2


def test_without_a_standby_trainer_a_new_one_is_started(started: Started) -> None:
    assert StandbyTrainer(started).take(1) is started[0]
