"""A frozen process of a replica is noticed by the others."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from adascale_worker.membership.replica_processes import CHECKS, ReplicaProcesses
from support.launch import wait_until

TIMEOUT = 0.2
Watch = Callable[[int], ReplicaProcesses]


@pytest.fixture
def ended() -> queue.SimpleQueue[int]:
    """Gets the index of each process that is taken for frozen."""
    return queue.SimpleQueue()


@pytest.fixture
def watch(tmp_path: Path, ended: queue.SimpleQueue[int]) -> Iterator[Watch]:
    made: list[ReplicaProcesses] = []

    def start(process: int) -> ReplicaProcesses:
        made.append(ReplicaProcesses(process, 3, torch.device("cpu")))
        made[-1].watch(str(tmp_path / "alive"), TIMEOUT, lambda other, _: ended.put(other))
        return made[-1]

    yield start
    for each in made:
        each.close()


def look(path: Path) -> None:
    """Wait until the process of a file has looked often enough to notice that another one is frozen."""
    seen: set[int] = set()

    def has_looked() -> bool:
        seen.add(path.stat().st_mtime_ns)
        return len(seen) > 2 * CHECKS

    wait_until(has_looked, "the process looks")


def test_a_process_that_shows_no_sign_of_life_is_noticed(
    tmp_path: Path, watch: Watch, ended: queue.SimpleQueue[int]
) -> None:
    (tmp_path / "alive-2").touch()  # a process that was frozen then
    watch(0)
    watch(1)
    assert ended.get(timeout=60) == 2


def test_processes_that_run_have_not_begun_or_have_stopped_are_not_taken_for_frozen(
    tmp_path: Path, watch: Watch, ended: queue.SimpleQueue[int]
) -> None:
    watch(0)
    look(tmp_path / "alive-0")
    other = watch(1)
    look(tmp_path / "alive-0")
    other.close()
    look(tmp_path / "alive-0")
    assert ended.empty()
