"""How a program ends: with which code, and in which words, as a process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run(ends: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TESTS / "support" / "programs" / "ends.py")],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS),
            "ENDS": ends,
            "STATE": str(state or ""),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        ("adam", 2, "adascale: got Adam; AdaScale scales the learning rate of torch.optim.SGD"),
        ("small data", 2, "adascale: the data set has 4 samples, fewer than batch_size of 8"),
    ],
)
def test_what_a_user_can_put_right_is_told_without_a_traceback(ends: str, code: int, message: str) -> None:
    ended = run(ends)
    assert (ended.returncode, message in ended.stderr) == (code, True), ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_error_of_the_program_itself_shows_where_it_was() -> None:
    ended = run("error")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert "ArithmeticError: the program's own" in ended.stderr


def test_a_signal_saves_and_leaves_with_its_code(tmp_path: Path) -> None:
    ended = run("signal", tmp_path)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert ended.stdout == "adascale: saved at step 3; the same command goes on from there\n"
    assert steps_saved(tmp_path) == [3]


def steps_saved(folder: Path) -> list[int]:
    return [json.loads(path.read_text())["step"] for path in sorted(folder.glob("*.json"))]


def test_a_full_disk_does_not_stop_training_and_is_told(small_disk: Path) -> None:
    ended = run("full disk", small_disk)
    assert ended.returncode == 0, ended.stderr
    assert "trained 6 steps" in ended.stderr
    words = "No space left on device; the last one, of step 2, is untouched"
    assert ended.stdout.count(words) == 2, ended.stdout
    assert ended.stdout.count("; training goes on") == 2
    assert steps_saved(small_disk) == [5, 6], "with room again it is saved again"


def test_leaving_with_a_full_disk_is_an_error(small_disk: Path) -> None:
    ended = run("full disk when leaving", small_disk)
    assert ended.returncode == 1
    assert "No space left on device; there is none before it" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(small_disk.iterdir())


LEAVES = """
import atexit
from adascale_worker.shutdown import QuickExit

quick = QuickExit()
atexit.register(print, "an exit function of the program")
try:
    quick.leave(75)
finally:
    print("a finally of the program")
"""


def test_leaving_quickly_leaves_out_nothing_of_the_program() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 75
    assert ended.stdout.splitlines() == ["a finally of the program", "an exit function of the program"]


LOSES_A_PEER = """
from adascale_worker.shutdown import leave_with_lost_peers

leave_with_lost_peers(3)
try:
    raise RuntimeError("[/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
except RuntimeError as error:
    raise ValueError("what the program made of it") from error
"""


def test_an_error_that_comes_of_a_lost_peer_is_told_from_the_programs_own() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOSES_A_PEER], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 76
    assert "a peer of generation 3 is gone" in ended.stderr
    assert "Traceback" not in ended.stderr
