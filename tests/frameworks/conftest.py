"""What the tests of frameworks need."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from adascale_core.names import LAUNCHER_VARIABLES
from adascale_worker.process import exit as shutdown


@pytest.fixture(autouse=True, scope="module")
def default_process_group() -> Iterator[None]:
    """Leave no default process group to the tests of another module in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def imported_modules() -> Iterator[None]:
    """Keep what was imported out of garbage collections, of which each training of transformers makes one."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the variables of a job, and the exit functions of trainers, which would end pytest."""
    for name in list(os.environ):
        if name.startswith(("ADASCALE_", "ACCELERATE_")) or name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setattr(
        shutdown, "atexit", SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
    )
    monkeypatch.setattr("sys.excepthook", sys.excepthook)


@pytest.fixture
def make_elastic(no_job: None) -> Iterator[Callable[..., Any]]:
    """Makes trainers of Hugging Face elastic, and closes them after the test."""
    from adascale.huggingface import elastic

    made: list[Any] = []

    def make(trainer: Any, **options: Any) -> Any:
        made.append(elastic(trainer, **options))
        return made[-1]

    yield make
    for trainer in reversed(made):
        trainer.elastic.close()


@pytest.fixture
def train_both(make_elastic: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Trains with a plain trainer and with an elastic one, each made with a name, and returns both."""

    def train(make: Callable[[str], Any], **options: Any) -> tuple[Any, Any]:
        plain, ours = make("plain"), make_elastic(make("elastic"), **options)
        for each in (plain, ours):
            each.train()
        return plain, ours

    return train
