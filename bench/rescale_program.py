"""The training program of `bench/rescale.py`. BENCH_STATE is the size of its state: `tiny` or `1GB`."""

import itertools
import os

import rescale_model
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer

STATE = os.environ.get("BENCH_STATE", "tiny")
dataset = TensorDataset(*rescale_model.samples(STATE))
size = rescale_model.LOCAL_BSZ
trainer = ElasticTrainer(batch_size=size, max_batch_size=8 * size, local_bsz_bounds=(size, size))
model, optimizer = rescale_model.make(STATE)
model.to(trainer.device)
state = trainer.program_reentry(model, optimizer)
for epoch in itertools.count(state.epoch):
    for x, y in trainer.dataloader(dataset):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(trainer.device)), y.to(trainer.device)).backward()
        optimizer.step()
    trainer.step(epoch)
