"""The training program of `bench/goodput.py` with AdaScale."""

import itertools

import goodput_model

from adascale import ElasticTrainer

trainer = ElasticTrainer()
model, optimizer = goodput_model.make()
records = goodput_model.Records(model)
state = trainer.program_reentry(model, optimizer)
for epoch in itertools.count(state.epoch):
    for (numbers,) in trainer.dataloader(goodput_model.samples(), shuffle=False):
        before = trainer.steps
        replicas, rank = trainer.replicas, trainer.rank
        records.learn(model, optimizer, numbers, step=before + 1, replicas=replicas, rank=rank)
        # Otherwise the step was discarded, and its samples come again.
        records.end(made=trainer.steps > before)
    trainer.step(epoch)
