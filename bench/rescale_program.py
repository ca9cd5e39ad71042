"""The training program of `bench/rescale.py`.

BENCH_STATE is the size of its state, BENCH_COMPUTE the seconds for which each step waits before its model.
"""

import itertools
import os
import time

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
        time.sleep(float(os.environ.get("BENCH_COMPUTE", "0")))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(trainer.device)), y.to(trainer.device)).backward()
        optimizer.step()
    trainer.step(epoch)
