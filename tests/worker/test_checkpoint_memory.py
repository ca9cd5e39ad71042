"""Tests of the memory that checkpoints need: a copy of the state, and not more."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launch import PROGRAMS
from support.members import Members

MIB = 2**20
STATE = 200 * MIB
BEHIND = PROGRAMS / "behind.py"
BEHIND_STATE = 3 * 64 * MIB
"""Bytes of the state of this program: weights, and two averages of Adam."""

# Saves or loads a state. Prints how far the memory of the process rises at most, in bytes, over what it had
# before there was a state.
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.state.store import CheckpointInfo, CheckpointStore
from adascale_worker.state.schedule import Checkpointing
from adascale_storage.folder import Folder

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

action, directory, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
info = CheckpointInfo(step=7, progress=21.5, epoch=1, replicas=2, generation=3, finished=False, saved_at=9.5)
group = ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"))
# Once with a small state before, which imports and initializes all that is needed.
small = Checkpointing(CheckpointStore(Folder(directory / "small")), 1.0, group)
small.start({"weights": torch.ones(1000)}, info)
assert small.wait(60)
assert CheckpointStore(Folder(directory / "small")).load() is not None
before = status("VmRSS:")
store = CheckpointStore(Folder(directory / "large"))
if action == "save":
    weights = [torch.ones(count // 4) for _ in range(4)]
    checkpointing = Checkpointing(store, 1.0, group)
    for step in (1, 2):
        checkpointing.start({"weights": weights}, replace(info, step=step), weights)
        assert checkpointing.wait(120)
    assert checkpointing.manifest.number == 2
else:
    state, _ = store.load()
    assert all(bool((each == 1).all()) for each in state["weights"])
print(status("VmHWM:") - before)
"""


def rise(action: str, directory: Path) -> int:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, action, str(directory), str(STATE // 4)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.slow
def test_saving_and_loading_need_at_most_twice_the_memory_of_the_state(tmp_path: Path) -> None:
    saving = rise("save", tmp_path)
    assert 1.9 * STATE < saving < 2.15 * STATE, "the state, its copy, and what is written at the moment"
    # A trainer has the model and the optimizer too when it loads.
    loading = rise("load", tmp_path)
    assert 0.9 * STATE < loading < STATE + 10 * 16 * MIB, "the state, and the parts that are verified"


@pytest.mark.slow
def test_rank_0_needs_no_more_memory_when_it_receives_a_state(
    make_members: Callable[..., Members], tmp_path: Path
) -> None:
    """It has the copy for checkpoints, which it needs no longer."""
    options = {"ADASCALE_CHECKPOINT_DIR": tmp_path / "checkpoints", "ADASCALE_CHECKPOINT_INTERVAL": 1000}
    job = make_members(PROGRAM=BEHIND, **options)
    assert len(job.complete(2)) == 1
    rise = json.loads((job.folder / "journal" / "rise").read_text())
    assert rise["steps"] == [3, 4], "the step that only the other rank has made is received"
    assert rise["bytes"] < 0.25 * BEHIND_STATE
