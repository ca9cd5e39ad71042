"""How trainers are started: a forked process runs the program as one that was started for it."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from adascale_core.names import ENV_PRELOAD
from adascale_worker.agent import trainer_starter
from adascale_worker.agent.trainer_starter import SERVER_NAME, Child, TrainerStarter, reap_orphans
from support.launch import wait_until

SHOW = """
import builtins, json, os, random, signal, sys
import __main__

def second():
    return 1 / 0

if __name__ == "__main__":
    children = None
    if os.environ["END"] == "pass":
        import multiprocessing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            children = pool.map(str, [1])
    print(json.dumps({
        "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
        "main": [__name__, __file__, __spec__, __package__, type(__loader__).__name__],
        "same": [__builtins__ is builtins, __main__.__dict__ is globals()],
        "future": str(second.__annotations__), "children": children,
        "environ": {name: os.environ[name] for name in ("GIVEN", "CHANGED") if name in os.environ},
        "unset": os.environ.get("LATER"), "folder": os.getcwd(), "name": open("/proc/self/comm").read(),
        "leads": os.getpgid(0) == os.getpid(), "input": sys.stdin.read(),
        "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }))
    print(random.random(), file=open(os.environ["RANDOM"], "a"))
    exec(os.environ["END"])
"""


def result_of(child: Child) -> tuple[str, int]:
    """Wait for the end of a process. Returns its output and its exit code."""
    assert child.stdout is not None
    with child.stdout:
        output = child.stdout.read()
    code = child.wait()
    trainer_starter.forget([child.pid])
    return output, code


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "show.py"
    path.write_text(SHOW)
    return path


@pytest.fixture(scope="module")
def starter(program: Path) -> Iterator[TrainerStarter]:
    """One whose server is ready."""
    starter = TrainerStarter([sys.executable, "-u", str(program), "--first", "2"])
    environ = {**os.environ, "END": "second()", "RANDOM": os.devnull}
    # The process from which the server is forked runs the program as Python does, too.
    assert result_of(starter.start(environ)) == result_of(plain(starter, environ))
    assert starter._server is not None
    assert select.select([starter._server], [], [], 30)[0]
    yield starter
    starter.close()


def plain(starter: TrainerStarter, environ: Mapping[str, str]) -> Child:
    """Start the program of a starter as it is."""
    return TrainerStarter(starter._command).start({**environ, ENV_PRELOAD: "0"})


def is_forked(child: Child) -> bool:
    return not isinstance(child, subprocess.Popen)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(7)", 7),
        ("raise SystemExit('bad')", 1),
        ("second()", 1),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_a_forked_process_runs_the_program_as_python_does(
    starter: TrainerStarter, tmp_path: Path, end: str, code: int
) -> None:
    environ = {**os.environ, "GIVEN": "1", "END": end, "RANDOM": str(tmp_path / "random")}
    child = starter.start(environ)
    assert is_forked(child)
    result = result_of(child)
    assert result == result_of(plain(starter, environ))
    assert result[1] == code
    assert json.loads(result[0].splitlines()[0])["environ"] == {"GIVEN": "1"}
    # Random numbers differ from one process to the next.
    result_of(starter.start(environ))
    assert len(set((tmp_path / "random").read_text().split())) == 3


def servers() -> set[int]:
    """The servers of this process that run, or are not reaped."""
    (listed,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}").glob("children")
    found = {int(each) for each in listed.read_text().split()}
    return {pid for pid in found if Path(f"/proc/{pid}/comm").read_text().strip() == SERVER_NAME}


def test_without_its_server_the_program_is_started_again_with_another(program: Path) -> None:
    others = servers()
    starter = TrainerStarter([sys.executable, "-u", str(program)])
    environ = {**os.environ, "END": "", "RANDOM": os.devnull}
    result_of(starter.start(environ))
    (server,) = servers() - others
    os.kill(server, signal.SIGKILL)
    assert starter._server is not None
    assert select.select([starter._server], [], [], 30)[0]
    child = starter.start(environ)
    assert not is_forked(child)
    assert result_of(child)[1] == 0
    assert select.select([starter._server], [], [], 30)[0]
    child = starter.start(environ)
    assert is_forked(child)
    assert result_of(child)[1] == 0
    starter.close()

    def is_gone() -> bool:
        reap_orphans()
        return servers() == others

    wait_until(is_gone, "the end of the server")


AGENT = """
import os, select, sys
from adascale_worker.agent.trainer_starter import TrainerStarter
starter = TrainerStarter(sys.argv[1:])
first = starter.start(os.environ)
first.stdout.readline()
select.select([starter._server], [], [])
second = starter.start(os.environ)
second.stdout.readline()
print(first.pid, second.pid, flush=True)
sys.stdin.read()
"""


def test_all_processes_end_with_the_agent(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(1000)\n")
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, sys.executable, str(tmp_path / "waits.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with agent:
        assert agent.stdout is not None
        started = [int(each) for each in agent.stdout.readline().split()]
        (listed,) = Path(f"/proc/{agent.pid}/task").glob("*/children")
        processes = [int(each) for each in listed.read_text().split()]
        assert len(processes) == 3
        assert set(started) < set(processes)
        agent.kill()

    def have_ended() -> bool:
        reap_orphans()
        return not any(Path(f"/proc/{pid}").exists() for pid in processes)

    wait_until(have_ended, "their end")


def test_only_a_program_that_this_python_runs_as_it_is_can_be_forked(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import os\nprint(os.environ['HOME'], os.environ.get('X') == 1)\n")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").write_text("#!/bin/sh\n")
    (folder / "python3").chmod(0o755)
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command, environ, expected in (
        (["python", str(program)], ours, True),
        (["python3", "-u", "-O", str(program), "-m"], ours, True),
        ([sys.executable, str(program)], ours, True),
        (["python", str(program)], {**ours, ENV_PRELOAD: "1"}, True),
        (["python", str(program)], {**ours, ENV_PRELOAD: "0"}, False),
        (["python3", str(program)], {"PATH": str(folder)}, False),
        (["python3", str(program)], {"PATH": str(tmp_path)}, False),
        (["python", str(tmp_path / "missing.py")], ours, False),
        (["python", str(tmp_path)], ours, False),
        (["python", "-m", "train"], ours, False),
        (["python", "-c", "pass"], ours, False),
        (["python", "-X", "dev", str(program)], ours, False),
        (["python"], ours, False),
        (["python", "-u"], ours, False),
        (["sh", "-c", f"python {program}"], ours, False),
        (["torchrun", str(program)], ours, False),
        ([str(program)], ours, False),
    ):
        assert trainer_starter._can_be_forked(command, environ) is expected, command
    for line in (
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "environ.setdefault('A', 'b')",
        "os.environ.update(A='b')",
        "os.putenv('A', 'b')",
        "load_dotenv()",
    ):
        program.write_text(f"import os\n{line}\n")
        assert not trainer_starter._can_be_forked([sys.executable, str(program)], ours), line


FORKS = """
import os, sys
from adascale_worker import preloaded

fork, calls, failing = os.fork, [], int(sys.argv.pop(1))

def limited():
    calls.append(1)
    if len(calls) == failing:
        raise BlockingIOError
    return fork()

os.fork, preloaded._preload = limited, lambda: None
sys.orig_argv.append(preloaded.__file__)
preloaded.main()
"""


@pytest.mark.parametrize("failing", [1, 2])
def test_without_processes_for_a_server_the_program_runs(tmp_path: Path, failing: int) -> None:
    """So it does if only one of the two processes can be forked."""
    (tmp_path / "counts.py").write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('.')\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        run = subprocess.run(
            [
                sys.executable,
                "-c",
                FORKS,
                str(failing),
                str(theirs.fileno()),
                str(tmp_path / "counts.py"),
            ],
            pass_fds=[theirs.fileno()],
            check=False,
        )
    assert run.returncode == 0
    assert (tmp_path / "runs").read_text() == "."


PRELOAD = """
import sys, torch
print("= imported", file=sys.stderr)
from adascale_worker import preloaded
preloaded._preload()
print("= preloaded", file=sys.stderr)
torch.cuda.is_available()
print("= looked", file=sys.stderr)
"""


def test_what_is_imported_before_the_program_looks_for_no_gpu() -> None:
    """A process that is forked after that cannot use one. To look for a GPU loads the driver's library."""
    run = subprocess.run(
        [sys.executable, "-c", PRELOAD],
        # Frameworks that other tests import set the last one.
        env={**os.environ, "LD_DEBUG": "libs", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    _, preloaded, looked, _ = re.split(r"^= \w+$", run.stderr, flags=re.MULTILINE)
    assert "find library=libcuda.so" not in preloaded
    # Unless this torch is built without CUDA, the search is found in this way.
    assert ("find library=libcuda.so" in looked) == (torch.version.cuda is not None)
