"""What tests of the worker share: trainers in the test's own process that leave nothing behind in it, and a
disk that can be filled.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adascale_worker import ElasticTrainer, shutdown
from adascale_worker import trainer as trainer_module

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ElasticTrainer]]:
    """Makes trainers on one replica; excepthook, signals and exit functions are put back afterwards."""
    for name in list(os.environ):
        if name.startswith("ADASCALE_") or name in TORCHRUN:
            monkeypatch.delenv(name)
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(trainer_module, "atexit", SimpleNamespace(register=at_exit.append))
    monkeypatch.setattr(shutdown, "atexit", SimpleNamespace(register=lambda _: None))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def make(**arguments: Any) -> ElasticTrainer:
        return ElasticTrainer(**arguments)

    yield make
    for function in at_exit:
        function()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte, so that it can be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
