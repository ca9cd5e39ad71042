"""Tests of how a training program ends, as a process: its exit code and its messages."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support.launch import PROGRAMS, TESTS, has_exited, run_program, wait_until
from support.training import MakeTrainer, network, sgd


def run(ends: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = PROGRAMS / "ends.py"
    return run_program(program, ENDS=ends, STATE=state or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        ("adagrad", 78, "adascale: got Adagrad; AdaScale scales torch.optim.SGD"),
        ("small data", 78, "adascale: the data set has 4 samples, fewer than batch_size (8)"),
    ],
)
def test_an_error_that_the_user_can_correct_is_printed_without_a_traceback(
    ends: str, code: int, message: str
) -> None:
    ended = run(ends)
    assert (ended.returncode, message in ended.stderr) == (code, True), ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_error_of_the_program_is_printed_with_its_traceback() -> None:
    ended = run("error")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert "ArithmeticError: raised by the program" in ended.stderr


def test_a_shutdown_signal_saves_and_exits_with_its_code_also_if_the_program_handles_it(
    tmp_path: Path,
) -> None:
    ended = run("signal", tmp_path)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert ended.stdout == "adascale: saved a checkpoint at step 3; run the same command to resume\n"
    assert steps_saved(tmp_path)[-1] == 3
    assert ended.stderr == "the handler of the program\n"


def steps_saved(folder: Path) -> list[int]:
    return [json.loads(path.read_text())["step"] for path in sorted(folder.glob("*.json"))]


@pytest.mark.slow
def test_training_continues_on_a_full_disk_which_is_reported_once(small_disk: Path) -> None:
    ended = run("full disk", small_disk)
    assert ended.returncode == 0, ended.stderr
    assert "trained 12 steps" in ended.stderr
    message = "No space left on device; the last checkpoint, of step 2, is unchanged"
    assert ended.stdout.count(message) == 1, ended.stdout
    assert ended.stdout.count("; training continues without this checkpoint") == 1
    # The disk has room again in step 9.
    again = re.search("adascale: checkpoints are saved again, the last one at step (9|10)", ended.stdout)
    assert again, ended.stdout
    assert steps_saved(small_disk)[-1] == 12


@pytest.mark.slow
def test_exiting_on_a_full_disk_is_an_error(small_disk: Path) -> None:
    ended = run("full disk when leaving", small_disk)
    assert ended.returncode == 1
    assert "No space left on device; " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert steps_saved(small_disk) in ([], [1], [2])
    assert not list(small_disk.glob("*.draft"))


EXITS = """
import atexit
from adascale_worker.process.exit import ProcessExit

process_exit = ProcessExit()
atexit.register(print, "an exit function of the program")
try:
    process_exit.exit(75)
finally:
    print("a finally block of the program")
"""

LOSES_A_PEER = """
from types import SimpleNamespace

from adascale_worker.loop.failures import Failures
from adascale_worker.process.exit import ProcessExit

ProcessExit().install(Failures(SimpleNamespace(group=SimpleNamespace(is_elastic=True))).end_after)
try:
    raise RuntimeError("[/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
except RuntimeError as error:
    raise ValueError("raised by the program") from error
"""

FAILS_IN_THE_CONSTRUCTOR = """
from adascale import ElasticTrainer

ElasticTrainer(batch_size=8, max_batch_size=4)
"""


def test_a_fast_exit_runs_finally_blocks_and_exit_functions_of_the_program() -> None:
    ended = run_program("-c", EXITS)
    assert ended.returncode == 75
    assert ended.stdout.splitlines() == ["a finally block of the program", "an exit function of the program"]


@pytest.mark.slow
def test_an_error_caused_by_a_lost_peer_has_its_own_exit_code() -> None:
    ended = run_program("-c", LOSES_A_PEER)
    assert ended.returncode == 76
    assert "lost the connection to a peer in communication of the program" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_trainer_used_before_program_reentry_says_so_without_a_traceback() -> None:
    ended = run_program(
        "-c", "from adascale import ElasticTrainer\nElasticTrainer(batch_size=8).dataloader([0] * 8)\n"
    )
    assert ended.returncode == 78, ended.stderr
    assert "call program_reentry(model, optimizer) first" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_error_in_the_constructor_is_printed_without_a_traceback() -> None:
    ended = run_program("-c", FAILS_IN_THE_CONSTRUCTOR)
    assert ended.returncode == 78
    assert ended.stderr.startswith("adascale: max_batch_size 4 is less than batch_size 8"), ended.stderr
    assert "Traceback" not in ended.stderr


# -- processes that the program forks -----------------------------------------------------------------------


def start_forking(state: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / "forks.py")],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS),
            "ADASCALE_CHECKPOINT_DIR": str(state),
            **environ,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_program_that_forks_saves_on_sigterm_and_leaves_no_process(tmp_path: Path) -> None:
    with start_forking(tmp_path) as program:
        try:
            assert program.stdout is not None
            pids = [int(pid) for pid in program.stdout.readline().split()]
            assert len(pids) == 1 + 2 + 1 + 2, "the program, its pool, its process, and its loader"
            program.send_signal(signal.SIGTERM)
            output, _ = program.communicate(timeout=30)
            assert program.returncode == 128 + signal.SIGTERM, output
            assert output.count("adascale: saved a checkpoint at step") == 1
            assert steps_saved(tmp_path)
            wait_until(lambda: all(map(has_exited, pids)), "the end of all its processes", 10)
        finally:
            kill_session(program)


@pytest.mark.slow
def test_a_program_can_terminate_the_processes_that_it_forks(tmp_path: Path) -> None:
    with start_forking(tmp_path, CLOSE="1") as program:
        try:
            output, _ = program.communicate(timeout=30)
            assert program.returncode == 0, output
        finally:
            kill_session(program)


def kill_session(program: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


# -- the handlers of this process -------------------------------------------------------------------------


def test_the_constructor_changes_no_handlers_and_close_restores_those_that_program_reentry_installs(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def handlers() -> list[object]:
        return [sys.excepthook, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    before = handlers()
    trainer = make_trainer(batch_size=8, checkpoint_dir=tmp_path)
    assert handlers() == before
    model = network()
    trainer.program_reentry(model, sgd(model))
    assert not any(new is old for new, old in zip(handlers(), before, strict=True))
    trainer.close()
    assert handlers() == before


def test_an_error_of_the_program_goes_to_the_excepthook_that_was_set_before(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: received.append(error))
    trainer = make_trainer(batch_size=8)
    model = network()
    trainer.program_reentry(model, sgd(model))
    error = ArithmeticError("raised by the program")
    sys.excepthook(ArithmeticError, error, None)
    assert received == [error]
