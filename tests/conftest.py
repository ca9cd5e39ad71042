"""What all tests need."""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from support.examples import FACTOR, examples
from support.session_report import SessionReport

if TYPE_CHECKING:
    from support.members import Members

# Each test computes little. Threads that wait for each other would take most of the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell without job control starts in the background ignores Ctrl-C, and what nohup starts a closed
# terminal. So would each process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Nothing is asserted about speed, so an example of a property may take any time. CI tries the same examples
# each time, so that it fails because of a change, and not by chance; runs elsewhere look for new ones.
settings.register_profile(
    "without-deadline",
    settings.get_profile("default"),
    deadline=None,
    max_examples=examples(25),
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("without-deadline")

# Runs of tests are not registered among those of the user.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="adascale-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Report the slowest files and the failures. Hide GPUs from all tests but those of `make test-gpu`."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SessionReport())
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the release check out, unless this is one or `-m` names them."""
    if FACTOR > 1 or "release" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("release")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def make_members(tmp_path: Path) -> "Iterator[Callable[..., Members]]":
    """Makes jobs of trainers with scripted agents, in folders of their own, and ends them after the test."""
    from support.members import Members

    made: list[Members] = []

    def make(name: str = "job", **options: object) -> Members:
        made.append(Members(tmp_path / name, **options))
        return made[-1]

    yield make
    for members in made:
        members.close()


@pytest.fixture
def durable_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes trainers wait for each periodic checkpoint, so that a test knows which is the last one."""
    from adascale_worker.state.schedule import Checkpointing

    start = Checkpointing.start

    def start_and_wait(writer: Checkpointing, *arguments: Any) -> None:
        start(writer, *arguments)
        writer.wait()

    monkeypatch.setattr(Checkpointing, "start", start_and_wait)
