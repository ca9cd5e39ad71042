"""A program that ends in the way that ENDS names. It saves checkpoints into STATE if that is set."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from adascale import ElasticTrainer
from adascale_worker.state.schedule import Checkpointing
from support.training import samples


class Ballast:
    """Registered state of a variable size."""

    def __init__(self) -> None:
        self.size = 0

    def state_dict(self) -> dict[str, Any]:
        return {"ballast": torch.zeros(self.size, dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.size = len(state_dict["ballast"])


def write_at_once() -> None:
    """Wait for each periodic checkpoint to be written."""
    start = Checkpointing.start

    def start_and_wait(writer: Checkpointing, *arguments: Any) -> None:
        start(writer, *arguments)
        writer.wait()

    Checkpointing.start = start_and_wait  # type: ignore[method-assign, assignment]


ends = os.environ["ENDS"]
if ends == "full disk":
    write_at_once()
state = Path(os.environ["STATE"]) if os.environ.get("STATE") else None
trainer = ElasticTrainer(
    batch_size=8,
    checkpoint_dir=state,
    checkpoint_interval=0 if ends == "full disk" else 1000,
)
model = nn.Linear(6, 2)
kind = torch.optim.Adagrad if ends == "adagrad" else torch.optim.SGD
optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1)
ballast = Ballast()
trainer.program_reentry(model, optimizer, register={"ballast": ballast})
if ends == "signal":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the handler of the program"))
size = {"small data": 4, "full disk": 96}.get(ends, 48)
for step, (_, x, y) in enumerate(trainer.dataloader(samples(size)), start=1):
    if step == 3:
        if ends == "error":
            raise ArithmeticError("raised by the program")
        if ends.startswith("full disk"):
            ballast.size = 3_000_000
        if ends in ("signal", "full disk when leaving"):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
    if step == 9:
        ballast.size = 0
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
trainer.step(0)
print("trained", step, "steps", file=sys.stderr)
