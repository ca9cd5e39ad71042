"""Fixtures of the worker's tests: a metrics service, trainers in the test's process, and a small disk."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adascale import ElasticTrainer
from adascale_worker.process import exit as shutdown
from support.file_systems import small_disk
from support.service import Job, Service

JOB_NUMBERS = count()
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU with CUDA, see `make test-gpu`"))


@pytest.fixture(scope="session")
def service_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A metrics service for all tests, because it takes long to start."""
    service = Service(tmp_path_factory.mktemp("service"))
    yield service
    service.stop(signal.SIGKILL)


@pytest.fixture
def service(service_of_all_tests: Service) -> Service:
    """A metrics service that runs, with a new job, of which it knows nothing yet."""
    service_of_all_tests.job_id = f"default.test-{next(JOB_NUMBERS)}"
    if service_of_all_tests.code is not None:
        service_of_all_tests.start()
    return service_of_all_tests


@pytest.fixture
def job(tmp_path: Path, service: Service) -> Iterator[Job]:
    """A job with agents, which end after the test."""
    running = Job(tmp_path, service)
    yield running
    running.end()


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ElasticTrainer]]:
    """Makes trainers on one replica, and closes them after the test."""
    for name in list(os.environ):
        if name.startswith("ADASCALE_") or name in TORCHRUN_VARIABLES:
            monkeypatch.delenv(name)
    # The exit functions of trainers would end pytest's own process.
    monkeypatch.setattr(
        shutdown, "atexit", SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
    )
    # A trainer whose construction fails installs a hook and cannot be closed.
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    trainers: list[ElasticTrainer] = []

    def make(**arguments: Any) -> ElasticTrainer:
        trainers.append(ElasticTrainer(**arguments))
        return trainers[-1]

    yield make
    for trainer in reversed(trainers):
        trainer.close()


@pytest.fixture(name="small_disk")
def disk_of_one_mebibyte(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte, which a test can fill."""
    with small_disk(tmp_path / "disk", mebibytes=1) as disk:
        yield disk
