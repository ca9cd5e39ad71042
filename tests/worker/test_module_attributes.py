"""Attributes of modules that the program changes are a part of the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adascale_worker.state.program import ModuleAttributes
from support.training import FIXED, MakeTrainer, network, sgd, train


class Module(nn.Module):
    """A module with attributes of several types."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.1)
        self.temperature = 1.0
        self.mode: Any = "warm-up"
        self.sizes: Any = (1, (2, None))
        self.is_initialized = False
        self.table: Tensor | None = None
        self.names: list[str] = []
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def changed_plainly(module: Module) -> None:
    module.temperature, module.mode, module.sizes, module.dropout.p = 0.5, None, (3, (4, "x")), 0.3
    module.is_initialized = True
    module.__dict__["steps"] = 7


def with_a_table(module: Module) -> None:
    module.is_initialized, module.table = True, torch.ones(2)


def with_names(module: Module) -> None:
    module.is_initialized = True
    module.names.append("a")


def with_another_buffer(module: Module) -> None:
    module.is_initialized = True
    module.register_buffer("cache", torch.ones(2), persistent=False)


def with_a_filled_buffer(module: Module) -> None:
    module.is_initialized = True
    module.cache.add_(1)


def test_plain_attributes_that_have_changed_are_restored_on_another_replica() -> None:
    module, other = Module(), Module()
    saved, joined = ModuleAttributes(module), ModuleAttributes(other)
    assert saved.state_dict() == {}
    changed_plainly(module)
    module.eval()
    state = saved.state_dict()
    assert set(state) == {"", "dropout"}
    joined.load_state_dict(state)
    assert (other.temperature, other.sizes, other.dropout.p) == (0.5, (3, (4, "x")), 0.3)
    assert other.mode is None
    assert other.is_initialized
    assert other.training
    assert joined.state_dict() == state


@pytest.mark.parametrize("change", [with_a_table, with_names, with_another_buffer, with_a_filled_buffer])
def test_a_module_that_has_changed_what_is_not_transferred_keeps_all_of_its_attributes(
    change: Callable[[Module], None],
) -> None:
    module = Module()
    attributes = ModuleAttributes(module)
    change(module)
    module.dropout.p = 0.3
    assert attributes.state_dict() == {"dropout": {"p": 0.3}}


@pytest.mark.usefixtures("durable_checkpoints")
def test_attributes_continue_from_a_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    values = []
    for end in (1, 2):
        trainer, model = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0), network()
        model.__dict__["temperature"] = 1.0
        optimizer = sgd(model)
        state = trainer.program_reentry(model, optimizer)
        values.append(model.temperature)
        if end == 1:
            model.__dict__["temperature"] = 0.5
        train(trainer, model, optimizer, epochs=range(state.epoch, end))
        trainer.close()
    assert values == [1.0, 0.5]
