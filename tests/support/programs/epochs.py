"""A loop over `trainer.epochs` that is left in epoch AT in the way that END names."""

import os
import sys

from adascale import ElasticTrainer
from support.training import learn, network, samples, sgd

EPOCHS, AT, END = 3, int(os.environ.get("AT", "-1")), os.environ.get("END", "")
trainer = ElasticTrainer(batch_size=8)
model = network()
optimizer = sgd(model)
trainer.program_reentry(model, optimizer)


def train() -> None:
    for epoch in trainer.epochs(EPOCHS):
        for index, x, y in trainer.dataloader(samples()):
            if epoch == AT and END == "error" and index[0] < 24:
                raise ArithmeticError("raised by the program")
            optimizer.zero_grad()
            learn(model, x, y)
            optimizer.step()
        if epoch == AT:
            if END == "finish":
                trainer.finish("no longer improves")
            if END in ("break", "finish"):
                break


train()
# In one call, so that the lines of two ranks are not mixed.
sys.stdout.write(f"rank {trainer.rank} ends after {trainer.steps} steps\n")
