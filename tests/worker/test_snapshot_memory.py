"""Tests of copies of the state in memory that outlives a process: the last complete one is found."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from adascale_storage.folder import Folder
from adascale_worker.errors import CheckpointError
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.process.snapshot_place import Condition, make_snapshot_files
from adascale_worker.state.file import Snapshot
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo, CheckpointStore
from support.fast_python import Program
from support.launch import wait_until

INFO = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=1, generation=3, finished=False, saved_at=9.5)
MIB = 2**20
PEAK_LEFT = 400
"""The memory that is left in a test with a peak."""

WRITER = """
import sys
import torch
from dataclasses import replace
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo

memory = SnapshotMemory(sys.argv[1].split(":"))
large, small = [torch.empty(2**20) for _ in range(8)], [torch.empty(10) for _ in range(600)]
for step in range(1, 10**9):
    for each in [*large, *small]:
        each.fill_(step)
    info = CheckpointInfo(
        step=step, progress=1.0, epoch=0, replicas=1, generation=1, finished=False, saved_at=0.0
    )
    memory.save({"large": large, "small": small, "number": step}, info, {})
"""


@pytest.fixture
def paths() -> Iterator[list[str]]:
    made = make_snapshot_files().split(":")
    yield made
    for path in made:
        os.close(int(Path(path).name))


def test_the_newest_copy_is_read_by_another_process_as_it_was_written(paths: list[str]) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    state: dict[str, Any] = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "number": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        "transposed": shared.T,
        "same": [shared, shared],
        "values": (1, "text", None, 2.5),
    }
    memory = SnapshotMemory(paths, lambda: inf)
    assert memory.newest() is None
    for step in (1, 2, 3):
        shared.fill_(step)
        memory.save(state, replace(INFO, step=step), {"accuracy": 0.25 * step})
        kept = SnapshotMemory(paths).newest()
        assert kept is not None
        assert (kept.info, kept.result) == (replace(INFO, step=step), {"accuracy": 0.25 * step})
        read = kept.read()
        for name in ("half", "number", "nothing", "transposed"):
            assert torch.equal(read[name], state[name]), name
            assert read[name].dtype == state[name].dtype
        assert read["same"][0] is read["same"][1]
        assert read["values"] == state["values"]
    memory.release()
    assert SnapshotMemory(paths).newest() is None


def test_a_default_device_of_the_program_does_not_change_what_is_read(
    paths: list[str], tmp_path: Path
) -> None:
    weights = torch.arange(8.0)
    state = {"weights": weights, "nothing": b""}
    with torch.device("meta"):
        memory = SnapshotMemory(paths, lambda: inf)
        memory.save(state, INFO, {})
        kept = memory.newest()
        assert kept is not None
        snapshot, store = Snapshot(), CheckpointStore(Folder(tmp_path))
        snapshot.copy(state)
        store.save(snapshot, INFO)
        loaded = store.load()
        assert loaded is not None
        for read in (kept.read(), loaded[0]):
            assert torch.equal(read["weights"], weights)
            assert read["nothing"] == b""


def test_a_process_that_is_killed_while_it_writes_leaves_the_copy_before(
    paths: list[str], tmp_path: Path
) -> None:
    """It is stopped at a moment at which a place is incomplete, and killed there."""
    (tmp_path / "writer.py").write_text(WRITER)
    writer = Program([str(tmp_path / "writer.py"), ":".join(paths)], dict(os.environ), tmp_path / "output")
    try:
        assert writer.pid is not None
        before = wait_until(partial(stopped_while_writing, writer.pid, paths), "a stop in a copy", pause=0.0)
        os.kill(writer.pid, signal.SIGKILL)
        wait_until(lambda: writer.code is not None, "the end of the writer")
    finally:
        writer.close()
    kept = SnapshotMemory(paths).newest()
    assert kept is not None
    state = kept.read()
    assert kept.info.step == state["number"] == before
    assert all(bool((each == before).all()) for each in [*state["large"], *state["small"]])
    # The next process writes over the incomplete copy.
    memory = SnapshotMemory(paths, lambda: inf)
    memory.save({"number": 99}, replace(INFO, step=99), {})
    newest = memory.newest()
    assert newest is not None
    assert (newest.info.step, newest.read()) == (99, {"number": 99})
    assert {number for number, _ in conditions(paths)} == {before, before + 1}


def stopped_while_writing(pid: int, paths: list[str]) -> int | None:
    """Stop a writer while a copy is incomplete, and return the number of the one before.

    None if it was complete: try again.
    """
    if not is_writing(paths):
        return None
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", "the stop", pause=0.0)
    if is_writing(paths):
        return max(number for number, is_valid in conditions(paths) if is_valid)
    os.kill(pid, signal.SIGCONT)
    return None


def is_writing(paths: list[str]) -> bool:
    """Whether one of two copies is incomplete, and has been complete before."""
    return sorted(is_valid for number, is_valid in conditions(paths) if number) == [False, True]


def conditions(paths: list[str]) -> list[tuple[int, bool]]:
    """Return the number of the copy in each file that is not empty, and whether it is valid."""
    found = []
    for path in paths:
        with Path(path).open("rb") as file:
            header = file.read(16)
        if header:
            found.append((int.from_bytes(header[8:], "little"), header[0] == 1))
    return found


def test_a_copy_that_was_being_restored_when_a_process_ended_is_not_used_again(paths: list[str]) -> None:
    memory = SnapshotMemory(paths, lambda: inf)
    memory.save({"number": 1}, INFO, {})
    memory.save({"number": 2}, INFO, {})
    kept = memory.newest()
    assert kept is not None
    kept.place.condition = Condition.RESTORING
    assert SnapshotMemory(paths).newest() is None
    kept.place.condition = Condition.VALID
    assert SnapshotMemory(paths).newest() is not None


def test_memory_for_two_copies_is_taken_only_if_it_is_a_quarter_of_what_is_left(paths: list[str]) -> None:
    state = {"weights": torch.ones(MIB)}
    left = [32.0 * MIB, 33.0 * MIB]
    memory = SnapshotMemory(paths, lambda: left[0])
    with pytest.raises(CheckpointError, match=r"two copies need 32 MiB of free memory, .* 32 MiB are left"):
        memory.save(state, INFO, {})
    assert memory.newest() is None
    left.pop(0)
    memory.save(state, INFO, {})
    memory.save(state, INFO, {})
    left[0] = 0.5 * MIB  # a tenth of the state has to be left when both copies are there
    memory.save(state, INFO, {})
    left[0] = 0.3 * MIB
    with pytest.raises(CheckpointError):
        memory.save(state, INFO, {})


def test_the_files_of_another_container_are_refused() -> None:
    with pytest.raises(CheckpointError, match="runs in another container or as another user"):
        SnapshotMemory(["/proc/1/fd/987654321"])


def test_a_file_that_an_agent_has_not_made_is_refused_and_not_changed(tmp_path: Path) -> None:
    """In another container, the number of the agent may be that of another process."""
    (tmp_path / "foreign").write_text("content")
    with (
        (tmp_path / "foreign").open("rb+") as file,
        pytest.raises(CheckpointError, match="is not the memory of the agent"),
    ):
        SnapshotMemory([f"/proc/{os.getpid()}/fd/{file.fileno()}"])
    assert (tmp_path / "foreign").read_text() == "content"


def test_a_copy_that_is_too_short_is_an_error_and_an_unknown_one_is_none(paths: list[str]) -> None:
    memory = SnapshotMemory(paths, lambda: inf)
    memory.save({"weights": torch.ones(MIB)}, INFO, {})
    kept = memory.newest()
    assert kept is not None
    os.truncate(next(path for path in paths if Path(path).stat().st_size), MIB)
    with pytest.raises(EOFError, match="shorter"):
        kept.read()
    for path in paths:
        Path(path).write_bytes(b"text")
    assert memory.newest() is None


# -- available memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        ("0::/\n", {}, 5000 * 1024),
        ("0::/\n", {"memory.max": "max", "memory.current": "9", "memory.stat": ""}, 5000 * 1024),
        ("0::/\n", {"memory.max": "4000", "memory.current": "1500", "memory.stat": "anon 900"}, 2500),
        (
            "0::/pod/worker\n",
            {
                "pod/worker/memory.max": "max",
                "pod/worker/memory.current": "1000",
                "pod/memory.max": "4000",
                "pod/memory.current": "3000",
                "pod/memory.stat": "inactive_file 300\nactive_file 50\nshmem 700",
            },
            1350,
        ),
        (
            "0::/\n",
            {
                "memory.max": "4000",
                "memory.current": "1500",
                "memory.peak": "3700",
                "memory.stat": "active_file 100",
            },
            PEAK_LEFT,
        ),
        (
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "3000",
                "memory/x/memory.usage_in_bytes": "1000",
                "memory/x/memory.stat": "inactive_file 1\nactive_file 0",
            },
            2001,
        ),
    ],
)
def test_the_least_memory_that_a_control_group_or_the_machine_has_never_used(
    own: str, files: dict[str, str], left: float, tmp_path: Path
) -> None:
    for name, content in {"own": own, "machine": "MemFree: 1 kB\nMemAvailable:  5000 kB\n"}.items():
        (tmp_path / name).write_text(content)
    for name, content in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "process").write_text("Name: python\nVmHWM: 7 kB\nVmRSS: 7 kB\n")
    found = [tmp_path / name for name in ("cgroup", "own", "machine", "process")]
    assert unused_memory(*found) == left
    # This process has used more before. The peak of a group includes that.
    (tmp_path / "process").write_text("VmHWM: 8 kB\nVmRSS: 7 kB\n")
    assert unused_memory(*found) == (left if left == PEAK_LEFT else left - 1024)


def test_the_unused_memory_of_this_machine_is_known() -> None:
    assert 0 < unused_memory() < inf
