"""What the code blocks of the documents use besides: a problem, a model, and a training that has begun."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(x).relu())


inputs = torch.randn(512, 8)
dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
test_set = TensorDataset(inputs[:50], dataset.tensors[1][:50])
criterion = cross_entropy


def begin():
    """Return a trainer, and what it trains."""
    from adascale import ElasticTrainer

    trainer = ElasticTrainer(epochs=2)
    model = Net().to(trainer.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trainer, model, optimizer, CosineAnnealingLR(optimizer, T_max=2 * len(dataset) // 32)


def enter():
    """Return the same after `program_reentry`."""
    trainer, model, optimizer, scheduler = begin()
    trainer.program_reentry(model, optimizer, scheduler)
    return trainer, model, optimizer, scheduler


def make_step(model, optimizer, x, y):
    """Make a step, or a part of one. Returns the loss."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def require_end(trainer):
    """Check that all epochs were trained."""
    assert trainer.finished and trainer.steps >= 32, (trainer.finished, trainer.steps)
