"""Trains a network in float64 on batches of 840 samples, which each number of replicas from 1 to 8 divides.

Environment: JOURNAL, the folder of its records and its weights (`tensors-REPLICA`); REPLICA; EPOCHS.
"""

import os

import torch
from torch import nn

from adascale import ElasticTrainer
from support.records import StepRecords

BATCH = 840

trainer = ElasticTrainer(batch_size=BATCH)
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
features = torch.randn(5 * BATCH, 6)
dataset = [(index, x, x.sin().sum(0, keepdim=True)) for index, x in enumerate(features)]
model = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
trainer.program_reentry(model, optimizer)
records = StepRecords(trainer)
for _ in trainer.epochs(int(os.environ["EPOCHS"])):
    for index, x, y in records.of(trainer.dataloader(dataset)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        records.add(index)
weights = [each.detach() for each in model.parameters()]
torch.save(weights, records.folder / f"tensors-{os.environ['REPLICA']}")
