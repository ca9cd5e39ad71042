"""Runs the README's loop over a stream, and writes the file $OUT.<rank> at its end.

STOP: the epoch in which the program fails, after three batches; none if not set.
"""

import itertools
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from adascale import ElasticTrainer

README = (Path(__file__).parents[3] / "README.md").read_text()
(code,) = [
    block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "get_local_bsz" in block
]

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
epochs: list[int] = []
batches: list[tuple[int, int]] = []  # The epoch and the size of each batch.


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless samples, of which each replica has its own."""

    def __init__(self, rank: int, replicas: int, epoch: int) -> None:
        epochs.append(epoch)
        self.generator = torch.Generator().manual_seed(1000 * epoch + rank)
        assert rank < replicas

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x = torch.randn(4, generator=self.generator)
            yield x, x.sum(0, keepdim=True)


def learn(x: Tensor, y: Tensor) -> None:
    if batches[-3:] == [(int(os.environ.get("STOP", "-1")), len(x))] * 3:
        raise RuntimeError("fails on purpose")
    batches.append((epochs[-1], len(x)))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


exec(textwrap.dedent(code), {**globals(), "itertools": itertools, "DataLoader": DataLoader})
result = {
    "start": [state.epoch, state.step],
    "epochs": epochs,
    "batches": len(batches),
    "sizes": sorted({size for _, size in batches}),
    "local_bsz": trainer.get_local_bsz(),
    "progress": trainer.progress,
    "schedule": scheduler.last_epoch,
    "weights": [parameter.tolist() for parameter in model.parameters()],
}
Path(f"{os.environ['OUT']}.{trainer.rank}").write_text(json.dumps(result))
