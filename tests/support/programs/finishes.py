"""A training program that ends as END says, in step AT.

END: `exit` (sys.exit(0)), `exit 3`, `raise main` (as raise SystemExit(main()), with 0), `break` (leaves its
loops), `next epoch` (leaves its data loop, in each epoch), `error`, `finish` (and continues its loop),
`finish and break`, `freeze` (a parameter, and continues), or `` (does all epochs). ON_RANK: the rank that
ends so; without it, all ranks. EPOCHS: epochs of its loop; if REQUIRED is set, it requires as many. STEPS:
`scale_invariant_steps`. The model is sharded over the processes of a replica, if it has several.
"""

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from adascale import ElasticTrainer
from adascale_worker.loop import failures, steps
from support.training import samples

failures.EXPLAIN_AFTER = 1.0
steps.FINISH_TIMEOUT = float(os.environ.get("FINISH_TIMEOUT", steps.FINISH_TIMEOUT))
end, at = os.environ.get("END", ""), int(os.environ.get("AT", "3"))
epochs = int(os.environ.get("EPOCHS", "3"))
arguments: dict[str, Any] = {}
if os.environ.get("REQUIRED"):
    arguments["epochs"] = epochs
if os.environ.get("STEPS"):
    arguments["scale_invariant_steps"] = int(os.environ["STEPS"])
trainer = ElasticTrainer(batch_size=8, max_batch_size=16, local_bsz_bounds=(4, 8), **arguments)
torch.manual_seed(1)
model = nn.Linear(6, 2)
if "ADASCALE_PROCESSES_PER_REPLICA" in os.environ:
    fully_shard(model, mesh=trainer.mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = trainer.program_reentry(model, optimizer)
step = state.step


def ends() -> bool:
    """End as END says; return whether to leave the loops."""
    if step != at or trainer.rank != int(os.environ.get("ON_RANK", trainer.rank)):
        return False
    if end.startswith("finish"):
        trainer.finish("no longer improves")
    if end == "freeze":
        model.bias.requires_grad_(False)
    if end == "error":
        raise ArithmeticError("raised by the program")
    if end == "exit":
        sys.exit(0)
    if end == "exit 3":
        sys.exit(3)
    return end in ("break", "finish and break", "raise main")


def train() -> None:
    """Train until the program ends."""
    global step
    for epoch in range(state.epoch, epochs):
        for _, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += trainer.made_step
            if end == "next epoch" and step % 6 == at and trainer.rank == int(os.environ["ON_RANK"]):
                break
            if ends():
                return
        trainer.step(epoch)
        if trainer.finished:
            return


train()
if end == "raise main":
    raise SystemExit(int(trainer.finished))
trainer.report_result(accuracy=0.5)
print(f"rank {trainer.rank} ends after {step} steps, finished: {trainer.finished}", flush=True)
