"""A training program whose steps take a given time.

PACE: seconds that a micro-batch takes, at least.
SLOW: the index of a replica on which it takes 3 times as long.
NOISE: noise of the targets; with more noise the gain of a larger batch is higher.
FAIL: files, separated by colons; while one of them exists, the program fails with the exit code in it.
OUTSIDE: if set, the optimizer has a parameter that the model has not, so that it fails on several replicas.
HUNGRY: a file; if it exists, the program deletes it and allocates the number of MiB in it.
"""

import itertools
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer

trainer = ElasticTrainer()
replica = os.environ.get("ADASCALE_REPLICA", "0")
pace = float(os.environ["PACE"]) * (3.0 if replica == os.environ.get("SLOW") else 1.0)
noise = float(os.environ.get("NOISE", "1"))
fails = [Path(file) for file in os.environ.get("FAIL", "/nonexistent").split(":")]
hungry = Path(os.environ.get("HUNGRY", "/nonexistent"))

torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs @ torch.randn(8, 1) + noise * torch.randn(512, 1)
model = nn.Linear(8, 1)
parameters = [*model.parameters()]
if os.environ.get("OUTSIDE"):
    parameters.append(nn.Parameter(torch.zeros(3)))
optimizer = torch.optim.SGD(parameters, lr=0.01)

state = trainer.program_reentry(model, optimizer)
generation = trainer.generation
print(f"enters generation {generation} at step {state.step}", flush=True)
loss = torch.zeros(())  # The result if no steps are left.
for epoch in itertools.count(state.epoch):
    for x, y in trainer.dataloader(TensorDataset(inputs, targets)):
        if trainer.generation != generation:
            generation = trainer.generation
            print(f"enters generation {generation} at step {trainer.steps}", flush=True)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        trainer.log(loss=loss)
        time.sleep(pace)
        for fail in fails:
            if fail.exists():
                print("this program fails on purpose", flush=True)
                sys.exit(int(fail.read_text()))
        if hungry.exists():
            size = int(hungry.read_text())
            hungry.unlink()
            taken = b"." * size * 2**20
    trainer.step(epoch)
    if trainer.finished:
        break
trainer.report_result(loss=loss.item())
