"""A training program with trackers: TensorBoard, and one that writes a file for each of its runs.

Environment: JOURNAL, a folder for both.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from adascale import ElasticTrainer
from adascale.trackers import TensorBoard
from support.training import samples

folder = Path(os.environ["JOURNAL"])


class Journal:
    """TensorBoard, with a journal of its calls."""

    def __init__(self) -> None:
        self._board = TensorBoard(folder / "board")

    def begin(self, run: str, step: int, progress: float) -> None:
        folder.mkdir(exist_ok=True)
        self._file = (folder / f"{run}.jsonl").open("a", buffering=1)
        self._board.begin(run, step, progress)

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        self._board.log(values, step, progress)
        record = {"process": os.getpid(), "step": step, "progress": progress, **values}
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._board.close()
        self._file.close()


trainer = ElasticTrainer(batch_size=12, tracker=Journal())
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = trainer.program_reentry(model, optimizer)
for _ in trainer.epochs(10):
    for _, x, y in trainer.dataloader(samples()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        trainer.log(loss=loss)
        time.sleep(0.1)
sys.exit(0)
