"""A training program that forks: workers of a DataLoader, a pool, and a process that never ends by itself.

Rank 0 prints the ids of its processes. With CLOSE=1, it terminates them after 5 steps and ends.
"""

import multiprocessing
import os
import time

import torch
from torch import nn

from adascale import ElasticTrainer
from support.training import samples

trainer = ElasticTrainer(batch_size=8)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer.program_reentry(model, optimizer)
context = multiprocessing.get_context("fork")
pool = context.Pool(2)
sleeper = context.Process(target=time.sleep, args=[600])
sleeper.start()
for step, (_, x, y) in enumerate(
    trainer.dataloader(samples(8_000), num_workers=2, multiprocessing_context="fork"), start=1
):
    assert pool.map(abs, [-step]) == [step]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step == 5:
        print(os.getpid(), *[child.pid for child in multiprocessing.active_children()], flush=True)
        if os.environ.get("CLOSE"):
            sleeper.terminate()
            sleeper.join()
            pool.terminate()
            pool.join()
            break
    time.sleep(0.01)
