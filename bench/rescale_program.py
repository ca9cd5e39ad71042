"""The training program of `bench/rescale.py`: rank 0 records the time of each step."""

import itertools
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from adascale_worker import ElasticTrainer

features = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(features, (features.sum(1) > 0).long())
trainer = ElasticTrainer(batch_size=8, max_batch_size=64, local_bsz_bounds=(8, 8))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(trainer.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = trainer.program_reentry(model, optimizer)
with (Path(os.environ["BENCH_FOLDER"]) / "steps").open("a", buffering=1) as steps:
    for epoch in itertools.count(state.epoch):
        for x, y in trainer.dataloader(dataset):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(trainer.device)), y.to(trainer.device)).backward()
            optimizer.step()
            if trainer.is_main:
                steps.write(f"{trainer.replicas} {time.time()}\n")
        trainer.step(epoch)
