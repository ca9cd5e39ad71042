"""A training program whose data set waits for SECONDS on rank ON_RANK, in its 40th sample."""

import os
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from adascale import ElasticTrainer
from adascale_worker.loop import failures

failures.WARN_AFTER = 1.0
failures.POLL_INTERVAL = 0.1


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random samples."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        if self.read == 40 and trainer.rank == int(os.environ["ON_RANK"]):
            time.sleep(float(os.environ["SECONDS"]))  # hangs here
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.tensor(index % 2)


trainer = ElasticTrainer(batch_size=8, scale_invariant_steps=30, checkpoint_dir=os.environ.get("STATE"))
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = trainer.program_reentry(model, optimizer)
for x, y in trainer.dataloader(Samples()):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
trainer.step(0)
print("trained")
