"""Runs a training program, and records the time of each optimizer step, without a change of the program.

    python step_times.py FOLDER PROGRAM [ARGUMENT...]

Each process appends a line to a file of its own in FOLDER for each optimizer step that it trains: the seconds
since 1970, the number of the step, the generation, the replicas and the rank. On a GPU a step ends when the
GPU has made it, which the program waits for.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from adascale import ElasticTrainer
from adascale_worker.adascale import AdaScale


def main() -> None:
    """Record and run."""
    folder, program, *arguments = sys.argv[1:]
    record(Path(folder))
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def record(folder: Path) -> None:
    """Record the steps of this process from now on."""
    trainers: list[ElasticTrainer] = []
    construct = ElasticTrainer.__init__

    def constructed(trainer: ElasticTrainer, *arguments: Any, **options: Any) -> None:
        construct(trainer, *arguments, **options)
        trainers.append(trainer)

    ElasticTrainer.__init__ = constructed  # type: ignore[method-assign, assignment]
    lines = (folder / f"steps-{os.getpid()}").open("a", buffering=1)

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        # A replica that waits makes the steps of others without it.
        if trainers and isinstance(optimizer, AdaScale):
            trainer = trainers[-1]
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            step = trainer._replica.progress.step + 1
            lines.write(f"{time.time()} {step} {trainer.generation} {trainer.replicas} {trainer.rank}\n")

    register_optimizer_step_post_hook(stepped)


if __name__ == "__main__":
    main()
