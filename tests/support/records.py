"""The records of a training program, in the files that `support.members.Members` reads."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adascale import ElasticTrainer


def digest(weights: Iterable[Tensor]) -> str:
    """Return a digest of weights, which differs if one bit does."""
    whole = torch.cat([each.detach().flatten() for each in weights])
    return hashlib.sha256(whole.cpu().numpy().tobytes()).hexdigest()


class StepRecords:
    """Records the steps of this process in the folder $JOURNAL, and pauses for $STEP_SECONDS after each.

    Args:
        trainer: of the program, after program_reentry.
        name: of the replica or the process; $REPLICA if None.
        processes: of a replica, that share its part of a batch.

    Attributes:
        folder: of the records.
        name: of the files of this process.
    """

    def __init__(self, trainer: ElasticTrainer, name: str | None = None, processes: int = 1) -> None:
        self.folder = Path(os.environ["JOURNAL"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = f"{os.environ['REPLICA'] if name is None else name}-{os.getpid()}"
        self._trainer = trainer
        self._processes = processes
        self._file = (self.folder / f"{self.name}.jsonl").open("w", buffering=1)
        self._pause = float(os.environ.get("STEP_SECONDS", "0"))
        self._indices: list[list[int]] = []
        self._step = self._samples = 0

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and note where training is before each."""
        for batch in batches:
            self._step, self._samples = self._trainer.steps, self._trainer.samples
            yield batch

    def add(self, indices: Tensor, **values: object) -> None:
        """Add the samples of a batch that was trained; with values, if this has completed a step."""
        trainer = self._trainer
        self._indices.append(indices.tolist())
        if trainer.steps > self._step:
            taken: list[list[int]] = []
            missing = (trainer.samples - self._samples) // (trainer.replicas * self._processes)
            while missing > 0 and self._indices:
                taken.insert(0, self._indices.pop())
                missing -= len(taken[0])
            self.write(
                step=trainer.steps,
                samples=[self._samples, trainer.samples],
                indices=[index for batch in taken for index in batch],
                batches=taken,
                rank=trainer.rank,
                replicas=trainer.replicas,
                generation=trainer.generation,
                progress=trainer.progress,
                **values,
            )
            self._indices.clear()
        time.sleep(self._pause)

    def write(self, **record: object) -> None:
        self._file.write(json.dumps(record) + "\n")

    def finish(self, weights: Iterable[Tensor]) -> None:
        """Write the digest of the final weights."""
        (self.folder / f"weights-{self.name}").write_text(digest(weights))
