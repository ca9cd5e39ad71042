"""A training program whose steps take a known time, so that what becomes of it is known too.

PACE: seconds that a micro-batch takes, at least.
NOISE: of the targets, beside which the gradient is small: the more, the more a larger batch is worth.
FAIL: files, with colons between; as long as one is there, the program fails with the exit code in it.
HUNGRY: a file; when it is there, the program removes it and takes as many MiB as it says.
"""

import itertools
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from adascale_worker import ElasticTrainer

trainer = ElasticTrainer()
pace = float(os.environ["PACE"])
noise = float(os.environ.get("NOISE", "1"))
fails = [Path(one) for one in os.environ.get("FAIL", "/nonexistent").split(":")]
hungry = Path(os.environ.get("HUNGRY", "/nonexistent"))

torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs @ torch.randn(8, 1) + noise * torch.randn(512, 1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

state = trainer.program_reentry(model, optimizer)
print(f"enters generation {trainer.generation} at step {state.step}", flush=True)
loss = torch.zeros(())  # where all steps are made already
for epoch in itertools.count(state.epoch):
    for x, y in trainer.dataloader(TensorDataset(inputs, targets)):
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
