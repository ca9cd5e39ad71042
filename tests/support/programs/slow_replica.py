"""A program whose steps take longer on one of its replicas. Run with torchrun.

SLOW: the rank that is slow.
WHERE: "loading" or "backward".
PACE, FACTOR: seconds of a step, and how many times as long it takes on that rank.
"""

import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer

trainer = ElasticTrainer(16, max_batch_size=16, local_bsz_bounds=(8, 8))
slow = os.environ["RANK"] == os.environ["SLOW"]
pace = float(os.environ["PACE"])
pause = pace * (float(os.environ["FACTOR"]) if slow else 1.0)


class Paced(nn.Module):
    """A layer with buffers, which all replicas get from rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        if os.environ["WHERE"] == "backward" and output.requires_grad:
            output.register_hook(lambda _: time.sleep(pause))
        return output


torch.manual_seed(0)
inputs = torch.randn(256, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = Paced()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
trainer.program_reentry(model, optimizer)
for _ in trainer.epochs(6):
    for x, y in trainer.dataloader(dataset):
        if os.environ["WHERE"] == "loading":
            time.sleep(pause)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
