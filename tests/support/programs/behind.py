"""A training program whose rank 0, after a checkpoint, does not make a step that the other rank makes.

It then gets the state of the other rank. Environment: JOURNAL, the folder of the results; REPLICA, a name for
its file. Replica 0 writes to `rise` by how many bytes its memory has risen meanwhile, and the steps before
and after.
"""

import json
import os
from pathlib import Path

import torch
from torch import nn

from adascale import ElasticTrainer
from adascale_worker.membership.links import PeersLostError
from support.records import digest

folder, checkpoints = Path(os.environ["JOURNAL"]), Path(os.environ["ADASCALE_CHECKPOINT_DIR"])
replica = os.environ["REPLICA"]
trainer = ElasticTrainer(batch_size=8, epochs=2)

torch.manual_seed(1)
features = torch.randn(48, 2048)
dataset = [(features[index], int(features[index].sum() > 0)) for index in range(48)]
model = nn.Sequential(nn.Linear(2048, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 2048, bias=False))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
folder.mkdir(parents=True, exist_ok=True)
before: list[int] = []
"""Bytes of memory when the step is discarded, and the last step that was made."""


def memory(name: str) -> int:
    """Return a number of bytes from the status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def lose_peers(*_: object) -> None:
    """Lose the other rank when the gradients are averaged, before the optimizer changes anything."""
    if replica == "0" and not before and list(checkpoints.glob("*.json")) and trainer.steps > 2:
        Path("/proc/self/clear_refs").write_text("5")  # resets the maximum
        before[:] = memory("VmRSS:"), trainer.steps
        trainer._replica.group.fail()
        raise PeersLostError


optimizer.register_step_pre_hook(lose_peers)
state = trainer.program_reentry(model, optimizer)
rise: int | None = None
for epoch in range(state.epoch, 2):
    for x, y in trainer.dataloader(dataset):
        if before and rise is None and trainer.generation == 2:
            rise = memory("VmHWM:") - before[0]
            (folder / "rise").write_text(json.dumps({"bytes": rise, "steps": [before[1], trainer.steps]}))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    trainer.step(epoch)

(folder / f"weights-{replica}").write_text(digest(model.parameters()))
