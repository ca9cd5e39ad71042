"""A training program with limited memory: a sample takes 4 MB, so a batch of 64 does not fit."""

import resource
from pathlib import Path

import torch
from torch import Tensor, nn

from adascale import ElasticTrainer

WIDTH = 500_000
SPARE = 300 * 2**20
"""Bytes beside what the process has at first."""


class Wide(nn.Module):
    """Keeps two tensors of 500,000 numbers for each sample, for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        wide = (x.mean(1, keepdim=True) * self.factor).expand(-1, WIDTH).sigmoid()
        return (wide * wide).mean(1)


trainer = ElasticTrainer(batch_size=64, epochs=2)
model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer.program_reentry(model, optimizer)
model(torch.ones(2, 3)).sum().backward()  # starts the threads of torch
optimizer.zero_grad()
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + SPARE
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
seen: list[int] = []
for epoch in range(2):
    for index, x in trainer.dataloader([(i, torch.full((3,), i / 128)) for i in range(128)]):
        steps = trainer.steps
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        seen += index.tolist()
        if trainer.steps > steps:
            assert len(set(seen[-64:])) == 64
            print(f"step {trainer.steps}: {trainer.accumulation} x {len(x)}")
    trainer.step(epoch)
