"""Trains on an endless stream, and writes the file $OUT.<rank> at its end.

STOP: the step after which the program fails; none if not set.
"""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset

from adascale import ElasticTrainer

trainer = ElasticTrainer(
    batch_size=8,
    max_batch_size=64,
    local_bsz_bounds=(8, 8),  # So two replicas train at twice the batch size, however fast they are.
    scale_invariant_steps=250,
    checkpoint_dir=os.environ["CHECKPOINTS"],
    checkpoint_interval=0.01,
)
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = StepLR(optimizer, step_size=100)
state = trainer.program_reentry(model, optimizer, scheduler)
seen: list[int] = []


class Stream(IterableDataset[int]):
    """Endless numbers."""

    def __iter__(self) -> Iterator[int]:
        yield from itertools.count()


def decode(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, generator=torch.Generator().manual_seed(number))
    return torch.tensor([float(number), *x.tolist()]), x.sum(0, keepdim=True)


def learn(x: Tensor, y: Tensor) -> None:
    if trainer.steps == int(os.environ.get("STOP", "-1")):
        raise RuntimeError("fails on purpose")
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[:, 1:]), y).backward()
    optimizer.step()
    seen.extend(map(int, x[:, 0].tolist()))


stream = Stream()
for _ in trainer.epochs():
    for batch in trainer.dataloader(stream, map=decode, num_workers=2):
        learn(*batch)
        scheduler.step()
result = {
    "start": state.step,
    "samples": trainer.samples,
    "seen": seen,
    "progress": trainer.progress,
    "schedule": scheduler.last_epoch,
    "weights": [parameter.tolist() for parameter in model.parameters()],
}
Path(f"{os.environ['OUT']}.{trainer.rank}").write_text(json.dumps(result))
