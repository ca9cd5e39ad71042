"""Agents with a real metrics service and scripted trainers: which messages each of them gets, and when."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from adascale_core.failures import (
    EXIT_CHECK_FAILED,
    EXIT_INVALID_PROGRAM,
    EXIT_REENTRY,
    EXIT_REFUSED,
    TerminationMessage,
    classify_exit,
)
from support.launch import PROGRAM, TIMEOUT, wait_until
from support.service import Service

TRAINER = PROGRAM.with_name("scripted_trainer.py")
ELASTIC = {"batch_size": 8, "max_batch_size": 64, "local_bsz_bounds": [1, 8], "max_replicas": 4}


class Trainer:
    """A scripted trainer process."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.pid = pid
        self._seen, self._todo = folder / f"{pid}.seen", folder / f"{pid}.todo"

    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._seen.read_text().splitlines()]

    def do(self, **message: object) -> None:
        with self._todo.open("a") as todo:
            todo.write(json.dumps(message) + "\n")

    def wait_for(self, kind: str, generation: int) -> dict[str, Any]:
        """Wait for a message of the agent, and return it."""

        def find() -> dict[str, Any] | None:
            messages = [each for each in self.seen() if each["type"] == kind]
            return next((each for each in messages if each["generation"] == generation), None)

        message: dict[str, Any] = wait_until(find, f"{kind} {generation} of {self.pid}: {self.seen()}")
        return message


def has_state(assignment: dict[str, Any]) -> bool:
    """Whether a member of the generation had the state of training when it became active."""
    return any(member["holds"] for member in assignment["members"])


class Job:
    """A job of a service, and agents with scripted trainers."""

    def __init__(self, folder: Path, service: Service) -> None:
        self.folder = folder
        self.service = service
        self.service.call("PUT", "", ELASTIC)
        self.agents: dict[int, subprocess.Popen[str]] = {}

    def start(
        self, *replicas: int, command: Sequence[str] = (sys.executable, str(TRAINER)), **environ: str
    ) -> None:
        for replica in replicas:
            with (self.folder / f"agent-{replica}.log").open("a") as log:
                self.agents[replica] = subprocess.Popen(
                    [sys.executable, "-m", "adascale_worker.agent", "--", *command],
                    env={
                        **os.environ,
                        "AUTOMATIC": "1",
                        "SCRIPTED": str(self.folder),
                        "ADASCALE_REPLICA": str(replica),
                        **self.service.environ,
                        **environ,
                    },
                    stdout=log,
                    stderr=log,
                    text=True,
                )

    def trainers(self, replica: int) -> list[Trainer]:
        """The trainers of a replica, the latest last."""
        found = [Trainer(self.folder, int(path.stem)) for path in self.folder.glob("*.seen")]
        started = [(each.seen()[0], each) for each in found if each.seen()]
        own = [(first["time"], each) for first, each in started if first["ADASCALE_REPLICA"] == str(replica)]
        return [each for _, each in sorted(own, key=lambda pair: pair[0])]

    def trainer(self, replica: int, number: int = 1) -> Trainer:
        """Wait for a replica's trainer of this number, from 1, and return it."""
        wait_until(lambda: len(self.trainers(replica)) >= number, f"trainer {number} of replica {replica}")
        return self.trainers(replica)[number - 1]

    def wait_for_members(self, generation: int, *members: int) -> None:
        """Wait until a generation runs on these replicas, by rank."""

        def runs() -> bool:
            view = self.service.job()
            active = view["active"]
            if view["broken"] or active is None or active["generation"] != generation:
                return False
            states = {each["replica"]: (each["state"], each["generation"]) for each in view["replicas"]}
            assert [each["replica"] for each in active["members"]] == list(members), active
            return all(states.get(member) == ("running", generation) for member in members)

        wait_until(runs, f"generation {generation} on {members}: {self.service.job()}", 60)

    def end(self) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.wait()


@pytest.fixture
def job(tmp_path: Path, service: Service) -> Iterator[Job]:
    running = Job(tmp_path, service)
    yield running
    running.end()


def test_trainers_stay_while_the_job_grows_and_shrinks(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0)
    job.wait_for_members(1, 0)
    first = job.trainer(0)
    assert first.seen()[0]["ADASCALE_REPLICAS"] == "1"
    assert not has_state(first.wait_for("assign", 1))
    job.service.allocate(2, 2)
    job.start(1)
    job.wait_for_members(2, 0, 1)
    second = job.trainer(1)
    assignments = [first.wait_for("assign", 2), second.wait_for("assign", 2)]
    assert [each["rank"] for each in assignments] == [0, 1]
    assert has_state(assignments[0])
    assert [each["holds"] for each in assignments[0]["members"]] == [True, False]
    assert assignments[0]["members"] == assignments[1]["members"]
    assert assignments[0]["secret"] == assignments[1]["secret"] != ""
    assert assignments[1]["env"]["ADASCALE_BATCH_SIZE"] == "8"
    assert assignments[1]["env"]["ADASCALE_REPLICAS"] == "2"
    job.service.allocate(3, 1)
    job.wait_for_members(3, 0)
    assert not second.wait_for("release", 3)["last"]
    assert len(job.trainers(0)) == 1
    assert (job.service.job()["failures"], job.service.job()["disruptions"]) == (0, 0)


def test_the_others_stay_when_a_trainer_is_killed_and_its_replacement_joins(job: Job) -> None:
    job.service.allocate(1, 3)
    job.start(0, 1, 2)
    job.wait_for_members(1, 0, 1, 2)
    os.kill(job.trainer(0).pid, signal.SIGKILL)
    for replica in (1, 2):
        assert job.trainer(replica).wait_for("hold", 1)
        assert has_state(job.trainer(replica).wait_for("assign", 2))
    replacement = job.trainer(0, 2)
    # The third generation; the second if the replacement is faster than those that hold.
    wait_until(lambda: len(job.service.job()["active"]["members"]) == 3, "the replacement is a member", 60)
    generation = job.service.job()["active"]["generation"]
    job.wait_for_members(generation, 1, 2, 0)
    assert replacement.wait_for("assign", generation)["rank"] == 2
    assert [len(job.trainers(replica)) for replica in (1, 2)] == [1, 1]
    view = job.service.job()
    assert (view["failures"], view["disruptions"], view["restarts_without_progress"]) == (0, 1, 0)


def test_a_trainer_that_was_taken_for_lost_is_replaced(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1)
    job.wait_for_members(1, 0, 1)
    job.trainer(0).do(type="holding", generation=1, step=5, lost=[1])
    assert job.trainer(1).wait_for("release", 2)
    job.wait_for_members(3, 0, 1)
    assert len(job.trainers(0)) == 1
    assert len(job.trainers(1)) == 2


def test_members_hold_while_the_service_is_away(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1)
    job.wait_for_members(1, 0, 1)
    job.service.stop(signal.SIGKILL)
    os.kill(job.trainer(1).pid, signal.SIGKILL)
    job.trainer(0).do(type="holding", generation=1, step=5, lost=[1])
    job.trainer(1, 2)
    job.service.start()
    wait_until(lambda: job.trainer(0).seen()[-1].get("generation", 0) >= 2, "generation 2")
    generation = wait_until(lambda: (job.service.job()["active"] or {}).get("generation"), "the generation")
    assert generation >= 2
    assert len(job.trainers(0)) == 1


def test_sigterm_to_a_trainer_from_outside_is_a_disruption(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0)
    job.wait_for_members(1, 0)
    job.trainer(0).do(type="terminated")
    job.trainer(0).do(exit=1)
    job.wait_for_members(2, 0)
    view = job.service.job()
    assert (view["failures"], view["disruptions"]) == (0, 1)


def test_a_trainer_in_a_shell_script_gets_the_request_to_save_and_exit(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0, command=["sh", "-c", f"true && {sys.executable} {TRAINER} | cat"])
    job.wait_for_members(1, 0)
    job.agents[0].send_signal(signal.SIGHUP)
    assert job.agents[0].wait(TIMEOUT) == EXIT_REENTRY
    assert job.trainer(0).seen()[-1] == {"type": "terminate"}


def test_an_agent_that_is_terminated_while_rank_0_has_not_finished_does_not_succeed(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1)
    job.wait_for_members(1, 0, 1)
    for trainer in (job.trainer(0), job.trainer(1)):
        trainer.do(type="final")
    job.trainer(1).do(exit=0)
    wait_until(lambda: "finished" in {each["state"] for each in job.service.job()["replicas"]}, "rank 1")
    job.agents[1].send_signal(signal.SIGTERM)
    assert job.agents[1].wait(TIMEOUT) == EXIT_REENTRY
    assert not job.service.job()["complete"]
    job.trainer(0).do(exit=0)
    assert job.agents[0].wait(TIMEOUT) == 0
    assert job.service.job()["complete"]


def test_an_exit_with_0_before_the_end_of_training_is_a_failure_that_is_not_repeated(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1)
    job.wait_for_members(1, 0, 1)
    for replica in (1, 0):
        job.trainer(replica).do(exit=0)
        assert job.agents[replica].wait(TIMEOUT) == EXIT_INVALID_PROGRAM
        failed = job.service.job()["replicas"][replica]
        assert (failed["state"], failed["exit_code"]) == ("failed", EXIT_INVALID_PROGRAM)
        assert "scripted_trainer.py ended with exit code 0, but not by the end of its train" in failed["log"]
        assert not job.service.job()["complete"]


def test_the_job_is_complete_when_rank_0_has_finished_whatever_its_index(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1)
    job.wait_for_members(1, 0, 1)
    os.kill(job.trainer(0).pid, signal.SIGKILL)
    job.wait_for_members(3, 1, 0)
    for trainer in (job.trainer(0, 2), job.trainer(1)):
        trainer.do(type="finished")
    job.trainer(0, 2).do(exit=0)
    wait_until(lambda: {"finished"} < {each["state"] for each in job.service.job()["replicas"]}, "rank 1")
    assert not job.service.job()["complete"]
    job.trainer(1).do(exit=0)
    assert [agent.wait(TIMEOUT) for agent in job.agents.values()] == [0, 0]
    assert job.service.job()["complete"]


def test_a_stall_is_registered_until_a_step_ends(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0)
    job.wait_for_members(1, 0)
    for stall in ("is at train.py, line 41, in load", ""):
        job.trainer(0).do(type="stalled", stall=stall)
        wait_until(lambda stall=stall: job.service.job()["replicas"][0]["stall"] == stall, repr(stall))  # type: ignore[misc]


def test_restarts_without_a_step_are_counted_and_delayed(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0, AUTOMATIC="0")
    for number in (1, 2, 3):
        os.kill(job.trainer(0, number).pid, signal.SIGKILL)
        wait_until(
            lambda number=number: job.service.job()["restarts_without_progress"] == number,  # type: ignore[misc]
            f"restart {number}",
        )


def test_another_version_is_refused_with_both_versions(job: Job) -> None:
    job.service.allocate(1, 1)
    job.start(0)
    job.wait_for_members(1, 0)
    registration = {
        "replica": 1, "instance": "other.1", "state": "waiting", "generation": 0, "address": "127.0.0.1",
        "port": 1, "version": "9.9",
    }  # fmt: skip
    with pytest.raises(HTTPError) as refusal:
        job.service.call("PUT", "/replicas/1", registration)
    assert refusal.value.code == 409
    assert re.search("replica 1 has adascale 9.9, but replica 0.*has 0", refusal.value.read().decode())


@pytest.mark.slow
def test_a_replica_that_reaches_no_member_does_not_join_and_the_others_train(job: Job) -> None:
    log = job.folder / "termination-log"
    job.service.allocate(1, 1)
    job.start(0, LISTENS="0")
    job.wait_for_members(1, 0)
    job.service.allocate(2, 2)
    job.start(1, ADASCALE_TERMINATION_LOG=str(log), ADASCALE_NODE_NAME="node-7")
    assert job.agents[1].wait(TIMEOUT) == EXIT_CHECK_FAILED
    message = TerminationMessage.parse(log.read_text())
    assert message is not None
    assert "replica 1 on node node-7 does not join: it could not connect to replica 0" in message.log
    assert [each["type"] for each in job.trainer(0).seen()] == ["started", "assign"]
    job.wait_for_members(1, 0)
    assert [each["replica"] for each in job.service.job()["replicas"]] == [0]


def install_version_9_9(folder: Path) -> str:
    """Return a path of packages with which an agent has another version, as from another image."""
    metadata = folder / "packages" / "adascale_operator-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: adascale-operator\nVersion: 9.9\n")
    return str(metadata.parents[1])


@pytest.mark.slow
def test_a_lost_replica_between_others_is_not_replaced_by_one_of_another_version(job: Job) -> None:
    packages, log = install_version_9_9(job.folder), job.folder / "termination-log"
    job.service.allocate(1, 3)
    job.start(0, 1, 2)
    job.wait_for_members(1, 0, 1, 2)
    job.agents[1].kill()
    job.agents[1].wait()
    job.start(1, PYTHONPATH=packages, ADASCALE_TERMINATION_LOG=str(log))
    # The service is told of the loss by the others, which go on without it.
    for replica in (0, 2):
        job.trainer(replica).do(type="holding", generation=1, step=5, lost=[1])
    job.wait_for_members(2, 0, 2)
    assert job.agents[1].wait(TIMEOUT) == EXIT_REFUSED
    assert not classify_exit(EXIT_REFUSED).is_failure
    message = TerminationMessage.parse(log.read_text())
    assert message is not None
    assert message.exit_code == EXIT_REFUSED
    printed = (job.folder / "agent-1.log").read_text()
    for text in (printed, message.log):
        assert re.search("replica 1 has adascale 9.9, but replica [02].*has 0", text), text
    job.wait_for_members(2, 0, 2)
    view = job.service.job()
    assert (view["failures"], view["disruptions"]) == (0, 1)
    job.start(1)
    job.wait_for_members(3, 0, 2, 1)
    assert [len(job.trainers(replica)) for replica in (0, 2)] == [1, 1]


@pytest.mark.slow
def test_a_frozen_trainer_is_killed_after_its_generation_is_broken(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1)
    job.wait_for_members(1, 0, 1)
    frozen = job.trainer(1)
    os.kill(frozen.pid, signal.SIGSTOP)
    job.trainer(0).do(type="holding", generation=1, step=5, lost=[1])
    job.wait_for_members(2, 0)
    job.wait_for_members(3, 0, 1)
    assert len(job.trainers(1)) == 2


def test_suspension_releases_all_and_says_that_nobody_keeps_the_state(job: Job) -> None:
    job.service.allocate(1, 2)
    job.start(0, 1)
    job.wait_for_members(1, 0, 1)
    job.service.allocate(2, 0)
    assert [job.trainer(replica).wait_for("release", 2)["last"] for replica in (0, 1)] == [True, True]
