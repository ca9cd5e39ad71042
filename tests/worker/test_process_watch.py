"""A frozen process of a replica is noticed by the others."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch

from adascale_worker.membership.process_group import ReplicaProcesses

CHECKS = 10


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each sign of life have a time of its own."""
    ticks, utime = itertools.count(1), os.utime
    monkeypatch.setattr(os, "utime", lambda path, *_: utime(path, ns=(tick := next(ticks), tick)))


def process_of(folder: Path, rank: int) -> ReplicaProcesses:
    process = ReplicaProcesses(rank, 3, torch.device("cpu"))
    process.show_signs(str(folder / "alive"))
    return process


def test_a_process_that_shows_no_sign_of_life_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "alive-2").touch()  # a process that was frozen then
    processes = [process_of(tmp_path, rank) for rank in (0, 1)]
    found = [[process.find_frozen(CHECKS) for process in processes] for _ in range(CHECKS + 2)]
    assert found == [[None, None]] * CHECKS + [[2, 2]] * 2


def test_processes_that_run_have_not_begun_or_have_stopped_are_not_taken_for_frozen(tmp_path: Path) -> None:
    first = process_of(tmp_path, 0)
    assert {first.find_frozen(CHECKS) for _ in range(2 * CHECKS)} == {None}
    other = process_of(tmp_path, 1)
    for _ in range(2 * CHECKS):
        assert first.find_frozen(CHECKS) is None
        assert other.find_frozen(CHECKS) is None
    other.close()
    assert not (tmp_path / "alive-1").exists()
    assert {first.find_frozen(CHECKS) for _ in range(2 * CHECKS)} == {None}
