"""A trainer as a process: its exit is detected, and it leaves no processes or sockets."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from adascale_core.failures import EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST, EXIT_REENTRY
from adascale_core.messages.allocation import Member
from adascale_core.messages.channel import Assignment, Hold, Terminate
from adascale_core.messages.registration import ReplicaState
from adascale_worker.agent.trainer_process import OUTPUT_TIMEOUT, TrainerProcess, TrainerStatus
from support.fast_python import PYTHON
from support.launch import PROGRAMS, wait_until


def shell(script: str) -> tuple[TrainerProcess, Callable[[], int]]:
    """A shell script in the place of a trainer, and a wait for its exit code."""
    changed = threading.Event()
    trainer = TrainerProcess(["sh", "-c", script], os.environ, on_change=changed.set)

    def exit_code() -> int:
        wait_until(lambda: trainer.exit_code is not None, "the end of the trainer")
        assert changed.is_set()
        assert trainer.exit_code is not None
        return trainer.exit_code

    return trainer, exit_code


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_trainer_has_an_exit_code_and_its_last_lines() -> None:
    trainer, exit_code = shell("for i in $(seq 100); do echo line $i; done; exit 7")
    assert exit_code() == 7
    assert trainer.log.splitlines() == [f"line {number}" for number in range(61, 101)]


@pytest.mark.parametrize(
    ("name", "default"), [("THP_MEM_ALLOC_ENABLE", "1"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")]
)
def test_a_trainer_has_settings_of_torch_unless_the_user_has_others(
    monkeypatch: pytest.MonkeyPatch, name: str, default: str
) -> None:
    for value, expected in ((None, default), ("3", "3")):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
        trainer, exit_code = shell(f"echo ${name}")
        assert exit_code() == 0
        assert trainer.log == expected


def test_processes_that_a_trainer_leaves_running_are_killed() -> None:
    trainer, exit_code = shell("sleep 1000 & echo $!; exit 3")
    assert exit_code() == 3
    wait_until(lambda: is_gone(int(trainer.log)), "the end of what it left running")


def test_a_process_that_keeps_the_output_open_does_not_hide_the_exit() -> None:
    began = time.monotonic()
    # It ends only once the other is out of its group.
    group = "$(cut -d' ' -f5 /proc/$!/stat)"
    trainer, exit_code = shell(f"setsid sleep 1000 & while [ {group} != $! ]; do :; done; echo $!; exit 3")
    try:
        assert exit_code() == 3
        assert time.monotonic() - began >= OUTPUT_TIMEOUT, "what may still come is waited for"
        assert not is_gone(int(trainer.log)), "in a group of its own it lives on"
    finally:
        os.kill(int(trainer.log), signal.SIGKILL)
        wait_until(
            lambda: not any(thread.name == "adascale-output" for thread in threading.enumerate()),
            "the end of the output",
        )


def test_ctrl_c_in_a_terminal_does_not_reach_the_trainer() -> None:
    trainer, exit_code = shell("echo $$; exec sleep 1000")
    wait_until(lambda: trainer.log, "its start")
    assert os.getpgid(int(trainer.log)) != os.getpgid(0)
    trainer.kill()
    assert exit_code() == -signal.SIGKILL
    trainer.send(Hold(1))
    trainer.kill()


STARTED = """
import json, os, signal, socket, sys
channel = socket.socket(socket.AF_UNIX)
channel.connect(os.environ["ADASCALE_AGENT_SOCKET"])
send = lambda **message: channel.sendall(json.dumps(message).encode() + b"\\n")
send(type="ready", port=7, pid=os.getpid())
assert json.loads(channel.makefile().readline()) == {"type": "terminate"}
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
send(type="exiting", code=int(sys.argv[1]))
sys.exit(int(sys.argv[1]))
"""
"""A trainer that a shell starts, as $TRAINER. It ends on the request of its agent."""


def start_in_shell(
    monkeypatch: pytest.MonkeyPatch, folder: Path, script: str
) -> tuple[TrainerProcess, Callable[[], int]]:
    """Start a shell script, and wait until the trainer in it is ready."""
    program, ready = folder / "started.py", folder / "ready"
    program.write_text(STARTED)
    monkeypatch.setenv("TRAINER", f"{sys.executable} -S {program}")
    monkeypatch.setenv("READY", str(ready))
    trainer, exit_code = shell(script)
    wait_until(lambda: trainer.status.pid, "the trainer")
    ready.touch()
    return trainer, exit_code


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("$TRAINER 75 && echo done", 75),
        ("$TRAINER 75 | cat", 75),
        ("$TRAINER 0 | cat", 0),
        ("$TRAINER 0; exit 3", 3),
        ("$TRAINER killed | cat", -signal.SIGKILL),
        ("$TRAINER killed; exit $?", 128 + signal.SIGKILL),
        # The shell ends before its trainer.
        ("$TRAINER 75 & while [ ! -e $READY ]; do sleep 0.01; done", 75),
        ("$TRAINER killed & while [ ! -e $READY ]; do sleep 0.01; done", -signal.SIGKILL),
        ("exec $TRAINER 75", 75),
    ],
)
def test_a_trainer_that_a_shell_has_started_gets_the_requests_and_has_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, code: int
) -> None:
    trainer, exit_code = start_in_shell(monkeypatch, tmp_path, script)
    if "READY" in script:
        wait_until(lambda: is_gone(trainer.pid), "the end of the shell")
    assert trainer.exit_code is None
    trainer.send(Terminate())
    assert exit_code() == code


def test_a_trainer_is_killed_with_the_shell_that_has_started_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer, exit_code = start_in_shell(monkeypatch, tmp_path, "$TRAINER 75; exit 3")
    trainer.kill()
    assert exit_code() == -signal.SIGKILL
    assert trainer.status.pid is not None
    assert is_gone(trainer.status.pid)


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 11)", -9)])
def test_a_trainer_that_is_killed_was_killed_whatever_the_launcher_exits_with(end: str, code: int) -> None:
    """torchrun exits with 1 then."""
    trainer = (
        "import json, os, socket;"
        "channel = socket.socket(socket.AF_UNIX);"
        "channel.connect(os.environ['ADASCALE_AGENT_SOCKET']);"
        "channel.sendall(json.dumps({'type': 'ready', 'port': 7, 'accelerator': ''}).encode() + b'\\n');"
        f"channel.makefile().readline(); {end}"
    )
    launcher = (
        "import subprocess, sys;"
        f"sys.exit(subprocess.run([sys.executable, '-c', {trainer!r}]).returncode != 0)"
    )
    process = TrainerProcess([sys.executable, "-c", launcher], os.environ, on_change=lambda: None)
    wait_until(lambda: process.status.port == 7, "the trainer is ready")
    process.send(Terminate())
    wait_until(lambda: process.exit_code is not None, "the end")
    assert process.exit_code == code


def test_a_trainer_reports_and_gets_messages_for_its_whole_life() -> None:
    script = (
        "import json, os, socket;"
        "channel = socket.socket(socket.AF_UNIX);"
        "channel.connect(os.environ['ADASCALE_AGENT_SOCKET']);"
        "send = lambda **message: channel.sendall(json.dumps(message).encode() + b'\\n');"
        "channel.sendall(b'what?\\n[1]\\n');"
        "send(type='ready', port=7, accelerator='NVIDIA-T4');"
        "lines = channel.makefile();"
        "message = json.loads(lines.readline());"
        "send(type='running', generation=message['generation']);"
        "lines.readline();"
        "send(type='holding', generation=3, step=12, lost=[2, 1, 2]);"
        "send(type='stepped', generation=3)"
    )
    trainer = TrainerProcess([sys.executable, "-c", script], os.environ, on_change=lambda: None)
    ready = TrainerStatus(port=7, accelerator="NVIDIA-T4")
    wait_until(lambda: trainer.status == ready, "the port")
    trainer.send(Assignment(3, 0, ()))
    running = replace(ready, state=ReplicaState.RUNNING, generation=3)
    wait_until(lambda: trainer.status == running, "the generation")
    trainer.send(Hold(3))
    wait_until(lambda: trainer.exit_code == 0, "the end")
    assert trainer.status == replace(running, state=ReplicaState.HOLDING, step=12, lost=(1, 2), stepped=3)


def test_the_agent_learns_that_a_batch_does_not_fit_into_a_later_process(
    tmp_path: Path,
) -> None:
    program = PROGRAMS / "sharded_members.py"
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "JOURNAL": str(tmp_path),
        "BOUNDS": '{"batch_size": 12, "local_bsz_bounds": [2, 12]}',
        "MEMORY": "4",
        "ADASCALE_PROCESSES_PER_REPLICA": "2",
    }
    trainer = TrainerProcess([*PYTHON, str(program)], environ, on_change=lambda: None, processes=2)
    wait_until(lambda: trainer.status.port is not None, "the trainer is ready")
    port = trainer.status.port or 0
    settings: dict[str, str | None] = {"ADASCALE_RANK": "0", "ADASCALE_REPLICAS": "1"}
    trainer.send(Assignment(1, 0, (Member(0, "i0", "127.0.0.1", port),), "secret", settings))
    wait_until(lambda: trainer.exit_code is not None, "the end of the trainer")
    assert trainer.exit_code in (EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST), trainer.log
    limit = trainer.status.local_bsz_limit
    assert limit is not None, trainer.log
    # A batch of the replica, which the processes share.
    assert 2 <= limit < 12
    assert f"training continues with at most {limit}" in trainer.log


@pytest.mark.parametrize("first", [0, 1])
def test_a_process_that_leaves_does_not_cut_short_the_end_of_another_one(tmp_path: Path, first: int) -> None:
    program = f"""
cd {tmp_path}
if [ $ADASCALE_LOCAL_RANK = {first} ]; then echo $$ > new; mv new pid; exit {EXIT_REENTRY}; fi
while [ ! -e pid ]; do sleep 0.02; done
while kill -0 $(cat pid) 2> kill.log; do sleep 0.02; done
sleep 0.3
echo reports are sent
exit {EXIT_REENTRY}
"""
    environ = {**os.environ, "ADASCALE_PROCESSES_PER_REPLICA": "2"}
    trainer = TrainerProcess(["sh", "-c", program], environ, on_change=lambda: None, processes=2)
    wait_until(lambda: trainer.exit_code is not None, "the end of the trainer")
    assert trainer.exit_code == EXIT_REENTRY
    assert "reports are sent" in trainer.log
