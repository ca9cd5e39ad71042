"""Trainers and agents that are killed or slow, and those that take their places."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from adascale_core.names import SNAPSHOT_FILE
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo
from support.launch import PROGRAM, AgentProcess, Journal, has_exited, run_python, wait_until
from support.service import LONG, Job

COPIED = {"BOUNDS": json.dumps({"batch_size": 12}), "ADASCALE_CHECKPOINT_INTERVAL": 1000, "SNAPSHOT_SHARE": 1}
"""A trainer whose state is copied after each step, and saved after the first only."""


def undisturbed_weights(job: Job, options: dict[str, object], replicas: int = 0) -> str:
    """Return the digest of the weights after a run of the program without agents and losses."""
    journal = Journal(job.folder / "undisturbed")
    saves = {"ADASCALE_CHECKPOINT_DIR": job.folder / "undisturbed-checkpoints"}
    arguments: dict[str, Any] = {**options, **saves, "JOURNAL": journal.folder}
    run_python(PROGRAM, replicas=replicas, **arguments)
    return journal.weights()


@pytest.mark.slow
def test_the_loss_of_the_only_trainer_costs_a_step_at_most(job: Job) -> None:
    """It is killed twice. The only checkpoint is of the first steps."""
    finish = job.folder / "finish"
    job.service.allocate(1, 1)
    (agent,) = job.start(
        0,
        **COPIED,
        EPOCHS=10**6,
        FINISH_FILE=finish,
        STEP_SECONDS=0.1,
    )
    for generation in (1, 2):
        job.wait_for_training(generation, steps=5)
        os.kill(job.trainer_pid(0), signal.SIGKILL)
    job.wait_for_training(3)
    finish.touch()
    assert agent.wait() == 0, job.logs()
    first, second, third = job.journal.attempts()
    for before, after in ((first, second), (second, third)):
        assert before.pid != after.pid
        assert before.last - 1 <= after.begin <= before.last
    steps = job.journal.effective()
    epochs, rest = divmod(len(steps), 4)
    assert rest == 0
    assert sorted(steps) == list(range(1, len(steps) + 1)), "every step exactly once"
    assert job.journal.weights() == undisturbed_weights(job, {**COPIED, "EPOCHS": epochs})
    view = job.service.job()
    assert (view["failures"], view["disruptions"]) == (0, 2)


@pytest.mark.slow
def test_a_spare_continues_from_the_copy_of_the_only_trainer(job: Job) -> None:
    """The trainer is killed, then the next one with its agent, as with a pod. The checkpoint is of step 1."""
    finish = job.folder / "finish"
    options = {**COPIED, "EPOCHS": 10**6, "FINISH_FILE": finish, "STEP_SECONDS": 0.1}
    job.service.allocate(1, 1, spares=1)
    job.start(0, **options)
    # The program makes its first weights with a seed of each replica.
    job.wait_for_training(1)
    job.start(1, **options)

    def wait_for_copies(generation: int) -> int:
        """Wait until the spare has a copy of this generation, and return its step."""
        job.wait_for_training(generation, steps=5)
        attempt = job.journal.attempts()[-1]
        begin, spare = attempt.begin, job.agents[1 - attempt.replica]

        def step_of_copy() -> int:
            info = newest_copy(spare)
            return info.step if info and info.generation == generation and info.step > begin + 2 else 0

        step: int = wait_until(step_of_copy, "a copy in the memory of the spare", pause=0.2)
        return step

    wait_for_copies(1)
    os.kill(job.trainer_pid(0), signal.SIGKILL)
    copied = wait_for_copies(2)
    lost = job.agents.pop()
    lost.end()
    job.wait_for_training(3)
    finish.touch()
    assert job.agents[0].wait() == 0, job.logs()

    first, second, third = job.journal.attempts()
    assert first.last - 1 <= second.begin <= first.last
    assert copied <= third.begin <= second.last
    assert [attempt.replica for attempt in (first, second, third)] == [0, 1, 0]
    steps = job.journal.effective()
    assert sorted(steps) == list(range(1, len(steps) + 1)), "every step exactly once"
    epochs, rest = divmod(len(steps), 4)
    assert rest == 0
    for epoch in range(epochs):
        taken = [index for number in range(1, 5) for index in steps[4 * epoch + number][0]["indices"]]
        assert sorted(taken) == list(range(48)), "every sample exactly once"
    assert job.journal.weights() == undisturbed_weights(job, {**COPIED, "EPOCHS": epochs})


def newest_copy(agent: AgentProcess) -> CheckpointInfo | None:
    """Return the description of the newest copy of the state in the memory of an agent."""
    descriptors = filter(is_snapshot_file, Path(f"/proc/{agent.process.pid}/fd").iterdir())
    paths = {path.stat().st_ino: str(path) for path in descriptors}
    kept = SnapshotMemory([*paths.values()]).newest() if paths else None
    return kept.info if kept is not None else None


def is_snapshot_file(path: Path) -> bool:
    """Whether the descriptor of a process at this path is of a file for copies."""
    try:
        return SNAPSHOT_FILE in str(path.readlink())
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_pod_that_is_replaced_leaves_after_another_has_joined_at_the_cost_of_no_step(job: Job) -> None:
    """As the operator replaces the only pod of a changed template: by a spare, which leaves at the end."""
    finish = job.folder / "finish"
    options = {**COPIED, "EPOCHS": 10**6, "FINISH_FILE": finish, "STEP_SECONDS": 0.1}
    job.service.allocate(1, 1)
    (old,) = job.start(0, **options)
    job.wait_for_training(1, steps=5)
    job.service.allocate(2, 1, spares=1)
    job.start(1, **options)
    wait_until(lambda: job.state_of(1) == "waiting", "the spare")
    job.wait_for_training(2, steps=5)
    old.process.send_signal(signal.SIGTERM)
    old.wait()
    job.wait_for_training(3, steps=5)
    job.start(0, **options)
    wait_until(lambda: job.state_of(0) == "waiting", "the next pod")
    job.service.allocate(job.generation() + 1, 1)
    job.wait_for_training(4, steps=5)
    finish.touch()
    assert job.agents[-1].wait() == 0, job.logs()
    steps = job.journal.effective()
    assert sorted(steps) == list(range(1, len(steps) + 1)), "every step exactly once"
    replicas = [attempt.replica for attempt in job.journal.attempts()]
    assert (replicas[0], replicas[-1]) == (0, 0)
    assert 1 in replicas
    view = job.service.job()
    assert (view["failures"], view["disruptions"]) == (0, 1)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_slow_replica_at_the_cost_of_no_step(job: Job) -> None:
    options = {**LONG, "BOUNDS": json.dumps({"batch_size": 12}), "EPOCHS": 250, "STEP_SECONDS": 0.004}
    options["ADASCALE_CHECKPOINT_INTERVAL"] = 1  # A step after a checkpoint is not compared.
    job.service.allocate(1, 2, spares=1)
    job.start(0, **options)
    job.start(1, **{**options, "STEP_SECONDS": 0.06})
    job.wait_for_training(1, replicas=2)
    job.start(2, **options)
    assert [agent.wait() for agent in job.agents] == [0, 0, 0], job.logs()
    view = job.service.job()
    assert [member["replica"] for member in view["active"]["members"]] == [0, 2], job.logs()
    assert view["active"]["slow_replacement"]["replica"] == 1
    assert "joins after step" in job.logs(), "the spare has followed"
    assert view["desired"] == {"generation": 2, "replicas": 2, "spares": 1, "failed": False}
    assert (view["complete"], view["failures"], view["disruptions"]) == (True, 0, 0)
    for rank in (0, 1):
        before, after = job.journal.attempts(rank)
        assert after.begin == before.last, "no step is made twice"
    assert len({attempt.pid for attempt in job.journal.attempts(0)}) == 1, "the trainer stays"
    steps = job.journal.effective()
    assert sorted(steps) == list(range(1, 1001))
    for first in range(1, 1001, 4):
        taken = [
            index for step in range(first, first + 4) for each in steps[step] for index in each["indices"]
        ]
        assert sorted(taken) == list(range(48)), "each sample exactly once"
    assert job.journal.weights() == undisturbed_weights(job, {**options, "STEP_SECONDS": 0}, replicas=2)


@pytest.mark.slow
def test_the_trainer_of_a_killed_agent_exits_and_another_agent_can_replace_it(job: Job) -> None:
    job.service.allocate(1, 2)
    _, second = job.start(0, 1, **LONG)
    job.wait_for_training(1, replicas=2)
    trainer = job.trainer_pid(1)
    second.process.kill()
    second.wait()
    job.agents.remove(second)
    wait_until(lambda: has_exited(trainer), "the exit of the orphaned trainer")
    job.start(1, **LONG)
    job.wait_for_training(2, replicas=2)
    assert job.service.job()["failures"] == 0


@pytest.mark.slow
def test_after_sigterm_the_others_keep_the_state_and_the_last_replica_saves_it(job: Job) -> None:
    job.service.allocate(1, 2)
    first, second = job.start(0, 1, **{**LONG, "ADASCALE_CHECKPOINT_INTERVAL": 1000})
    job.wait_for_training(1, replicas=2, steps=3)
    second.process.terminate()
    assert second.wait() == 75
    job.service.allocate(job.service.job()["desired"]["generation"] + 1, 1)
    job.wait_for_training(job.service.job()["desired"]["generation"])
    before, after = job.journal.attempts(0)
    left_at = before.last
    assert after.begin == left_at, "no step is made twice"
    assert job.service.job()["disruptions"] == 1, "a replica that leaves is in no later generation"
    assert job.saved_step() < left_at, "the first step of the job, which is always saved"
    first.process.terminate()
    assert first.wait() == 75
    assert job.saved_step() == job.journal.last_step()
