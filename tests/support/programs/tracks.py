"""A training program with the tracker of docs/training.md, which is executed as it is there.

Environment: JOURNAL, a folder with a file for each run of the tracker, whose records have process and step.
"""

import json
import os
import re
import sys
import time
import types
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adascale import ElasticTrainer
from support.training import samples

folder = Path(os.environ["JOURNAL"])


class Run:
    """A run of a tracker. Each process that opens it by its id adds to it."""

    def __init__(self, project: str, id: str, resume: str) -> None:  # noqa: A002
        folder.mkdir(exist_ok=True)
        path = folder / f"{project}-{id}.jsonl"
        if resume != "allow" and path.exists():
            raise ValueError(f"run {id} exists")
        self._file = path.open("a", buffering=1)

    def log(self, metrics: dict[str, float], step: int) -> None:
        record = {"process": os.getpid(), "step": step, **metrics}
        self._file.write(json.dumps(record) + "\n")


wandb = types.SimpleNamespace(init=Run)
trainer = ElasticTrainer(batch_size=12)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
text = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
(recipe,) = (
    block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Tracker" in block
)
names: dict[str, Any] = {
    "trainer": trainer,
    "model": model,
    "optimizer": optimizer,
    "wandb": wandb,
    "uuid": uuid,
}
exec(recipe, names)
for epoch in range(names["state"].epoch, 10):
    for _, x, y in trainer.dataloader(samples()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if trainer.made_step:
            names["tracker"].log(loss=loss.item())
        time.sleep(0.01)
    trainer.step(epoch)
sys.exit(0)
