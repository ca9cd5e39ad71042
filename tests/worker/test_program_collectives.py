"""The mean of a tensor over the replicas, on one of them. tests/frameworks has it on several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from adascale import ElasticTrainer
from adascale.errors import WorkerError
from support.training import network, sgd


def test_on_one_replica_the_mean_is_the_value_without_its_graph(
    make_trainer: Callable[..., ElasticTrainer],
) -> None:
    trainer = make_trainer(batch_size=8)
    model = network()
    trainer.program_reentry(model, sgd(model))
    value = torch.tensor([1.5, 2.5], requires_grad=True)
    mean = trainer.mean_over_replicas(value)
    assert torch.equal(mean, value)
    assert not mean.requires_grad
    mean += 1.0
    assert value.tolist() == [1.5, 2.5]
    assert trainer.mean_over_replicas(torch.tensor(3)).dtype is torch.float32
    assert trainer.batch_size == 8


def test_before_program_reentry_the_mean_is_refused(make_trainer: Callable[..., ElasticTrainer]) -> None:
    with pytest.raises(WorkerError, match="call program_reentry"):
        make_trainer(batch_size=8).mean_over_replicas(torch.tensor(1.0))
