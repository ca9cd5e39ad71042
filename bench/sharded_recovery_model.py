"""The model and the records of `bench/sharded_recovery.py`, without AdaScale: torchft's program has none."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

WIDTH = 2048
BLOCKS_PER_GB = 20
"""A block has 4.2 million weights: 50 MB with the two moments of AdamW."""
LOCAL_BSZ = 8
"""Samples of a replica in a step."""
SAMPLES = 1 << 14
REPORTED_STEPS = range(2, 6)
"""Steps of a process whose peak of memory is reported."""


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output: shape (samples, WIDTH)."""
        added: torch.Tensor = self.linear(torch.relu(x))
        return x + added


def make(gigabytes: float, mesh: Any) -> tuple[nn.Sequential, torch.optim.AdamW]:
    """Return a sharded model, made in shards, and its optimizer, whose state has this size together."""
    with torch.device("meta"):
        blocks = [Block() for _ in range(round(gigabytes * BLOCKS_PER_GB))]
        model = nn.Sequential(*blocks, nn.Linear(WIDTH, 16))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.01)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def samples() -> TensorDataset:
    """Return samples: an index, and a class."""
    numbers = torch.arange(SAMPLES)
    return TensorDataset(numbers, numbers % 16)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, number: torch.Tensor, y: torch.Tensor) -> None:
    """Make a step with samples, whose features follow from their indices."""
    frequencies = torch.arange(1, WIDTH + 1) / WIDTH
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.sin(number[:, None] * frequencies)), y).backward()
    optimizer.step()


class Records:
    """Records the steps and the memory of a process.

    Args:
        folder: of the files.
        process: index of this process in its replica.
    """

    def __init__(self, folder: str, process: int) -> None:
        self._folder = Path(folder)
        kind = "steps" if process == 0 else "others"
        self._steps = (self._folder / f"{kind}-{os.getpid()}").open("a", buffering=1)
        self._samples = (self._folder / f"samples-{os.getpid()}").open("a", buffering=1)
        self._drawn = (self._folder / f"drawn-{os.getpid()}").open("a", buffering=1)
        self._memory: dict[str, float] = {"process": process, "imported": memory("VmRSS")}
        self._made = 0

    def drawn(self, indices: Sequence[int]) -> None:
        """Record samples that the program is given, before their step."""
        self._drawn.write(json.dumps(list(indices)) + "\n")

    def made(self, step: int, generation: int, replicas: int, rank: int, indices: Sequence[int]) -> None:
        """Record a step that was made, and the samples of this process in it."""
        self._steps.write(f"{time.time()} {step} {generation} {replicas} {rank}\n")
        self._samples.write(json.dumps([step, list(indices)]) + "\n")
        self._made += 1
        if self._made == REPORTED_STEPS.start:
            forget_peak()
        elif self._made == REPORTED_STEPS.stop:
            self.record_peak("training")

    def record_peak(self, name: str) -> None:
        """Record the greatest memory since `forget_peak`, in MB."""
        self._memory[name] = memory("VmHWM")
        draft = self._folder / f"draft-{os.getpid()}"
        draft.write_text(json.dumps(self._memory))
        draft.rename(self._folder / f"memory-{os.getpid()}")


def forget_peak() -> None:
    """Let the greatest memory of this process be its present one."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> float:
    """Return a value of this process's memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1000
