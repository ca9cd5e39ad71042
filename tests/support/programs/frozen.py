"""A training program that freezes and unfreezes parameters, and records its steps.

Environment: JOURNAL, the folder of the records; REPLICA, a name for its files; BOUNDS, arguments of the
trainer as JSON; EPOCHS; STEP_SECONDS, the minimum duration of a step; FROZEN, the names that are frozen at
the beginning; CHANGES, the names that are frozen from a place on, each only if the program is there, as JSON:
{"step 3": [...], "micro 3": in its second micro-batch, "begin 1": before the loop of epoch 1, "end 1": after
it}; INSIDE, if set, each step has a second loss, for which a part is frozen.
"""

import json
import os

import torch
from torch import nn

from adascale import ElasticTrainer
from support.records import StepRecords
from support.training import network, samples, sgd

changes = json.loads(os.environ.get("CHANGES", "{}"))
trainer = ElasticTrainer(**json.loads(os.environ["BOUNDS"]))
model = network()


def freeze(names: list[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


def change(place: str) -> None:
    if place in changes:
        freeze(changes[place])


def learn(x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()
    if os.environ.get("INSIDE"):
        freeze(["3.weight", "3.bias"])
        model(x).square().mean().backward()
        freeze([])


freeze(json.loads(os.environ.get("FROZEN", "[]")))
optimizer = sgd(model)
state = trainer.program_reentry(model, optimizer)
records, micro = StepRecords(trainer), 0
for epoch in range(state.epoch, int(os.environ["EPOCHS"])):
    change(f"begin {epoch}")
    for index, x, y in records.of(trainer.dataloader(samples())):
        change(f"step {trainer.steps}")
        if micro == 1:
            change(f"micro {trainer.steps}")
        optimizer.zero_grad()
        learn(x, y)
        optimizer.step()
        micro = 0 if trainer.made_step else micro + 1
        records.add(index, epoch=epoch, gain=trainer.adascale.gain())
    change(f"end {epoch}")
    trainer.step(epoch)
torch.save([parameter.detach() for parameter in model.parameters()], records.folder / "parameters.pt")
records.finish(model.parameters())
