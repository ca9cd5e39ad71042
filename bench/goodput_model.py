"""The model, the timed device and the records of `bench/goodput.py`, without AdaScale: torchft's has none.

The model is a classifier behind a table of features that is not trained, as an adapter on a frozen model: the
state is 1 GB, and a step computes little. What a device would compute is a wait, in proportion to the
samples: replicas on this machine would share its cores, and a lost one would free some for the others.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH = int(os.environ["BENCH_BATCH"])
"""Samples of a step of all replicas."""
SHAPES = {"tiny": (256, 32), "1GB": (1 << 18, 1024)}
"""Rows and columns of the table."""
PATTERN = 256
"""Rows of the table that differ."""
SAMPLES = 1 << 20
SLOWNESS = 1.2
"""How much longer the device of a slow replica takes."""
COMPARED_STEPS = 20
"""Each step whose number is a multiple of this one records the weights."""


class Model(nn.Module):
    """Two linear layers, and the table."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=True)
        # In double precision, another order of additions changes the weights by less than any mistake would.
        self.layers = nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 2)).double()
        with torch.no_grad():
            self.table.weight.view(-1, PATTERN, columns).copy_(torch.randn(PATTERN, columns))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the outputs for samples, given by their numbers: shape (samples, 2)."""
        outputs: torch.Tensor = self.layers(self.table(numbers % self.table.num_embeddings).double())
        return outputs


def make() -> tuple[Model, torch.optim.SGD]:
    """Return the model, and its optimizer; BENCH_STATE is the size of the state, `tiny` or `1GB`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(*SHAPES[os.environ["BENCH_STATE"]])
    return model, torch.optim.SGD(model.layers.parameters(), lr=0.01, momentum=0.9)


def samples() -> TensorDataset:
    """Return the data set: the numbers of the samples, from which features and classes follow."""
    return TensorDataset(torch.arange(SAMPLES))


def share(step: int, rank: int, replicas: int) -> torch.Tensor:
    """Return the samples of a rank in the step after so many, if all replicas take part in each."""
    size = BATCH // replicas
    first = (step * replicas + rank) * size
    return torch.arange(first, first + size)


class Records:
    """Records the steps of a process in the folder BENCH_FOLDER.

    Each line is the JSON of a list: whether the step was made, or null at its begin, the seconds since 1970
    of its begin and end, its number, the replicas in it, the rank, and the samples of this process. Another
    file has, for some steps, the number, the SHA-256 of the trained weights, and some of them.
    """

    def __init__(self, model: nn.Module) -> None:
        folder = Path(os.environ["BENCH_FOLDER"])
        self._model = model
        self._slow = folder / f"slow-{os.getpid()}"
        self._steps = (folder / f"steps-{os.getpid()}").open("a", buffering=1)
        self._weights = (folder / f"weights-{os.getpid()}").open("a", buffering=1)
        self._sample_seconds = float(os.environ["BENCH_STEP_SECONDS"]) / BATCH
        self._replicas = int(os.environ["BENCH_REPLICAS"])
        self._step: list[Any] = []
        self._begun = time.time()

    def learn(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        numbers: torch.Tensor,
        *,
        step: int,
        replicas: int,
        rank: int,
    ) -> None:
        """Record the begin of a step, compute the gradients of its samples, and call the optimizer.

        Args:
            model: called with the numbers.
            optimizer: of its parameters.
            numbers: the samples of this process.
            step: the number of the step, from 1.
            replicas: that take part in it.
            rank: of this process.
        """
        self._begun, self._step = time.time(), [step, replicas, rank, numbers.tolist()]
        self._write(self._steps, [None, self._begun, self._begun, *self._step])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(numbers), numbers % 2)
        self._wait_for_device(len(numbers))
        loss.backward()
        optimizer.step()

    def _wait_for_device(self, samples: int) -> None:
        seconds = samples * self._sample_seconds * self._replicas
        time.sleep(seconds * (SLOWNESS if self._slow.exists() else 1.0))

    def end(self, *, made: bool, replicas: int | None = None) -> None:
        """Record the end of the step.

        Args:
            made: whether the optimizer has changed the weights, and the samples of this process are in it.
            replicas: that took part in it, if that was not known at its begin.
        """
        step, expected, rank, numbers = self._step
        self._write(self._steps, [made, self._begun, time.time(), step, replicas or expected, rank, numbers])
        if made and rank == 0 and step % COMPARED_STEPS == 0:
            trained = [p.detach().flatten() for p in self._model.parameters() if p.requires_grad]
            weights = torch.cat(trained)
            digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
            some: Sequence[float] = weights[:: max(len(weights) // 200, 1)].tolist()
            self._write(self._weights, [step, digest, some])

    @staticmethod
    def _write(file, values) -> None:  # type: ignore[no-untyped-def]
        file.write(json.dumps(values) + "\n")
