"""A training program that records its steps, for tests of agents.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, the trainer's arguments as JSON;
STEP_SECONDS, the minimum duration of a micro-batch; FAIL_AT, a step at which rank FAIL_RANK raises an error,
once; COMPARISON_INTERVAL, seconds between comparisons of the weights; FINISH_FILE, a file that ends training
after the current epoch, for a job on a single replica; SNAPSHOT_SHARE, the share of the time that copies in
the memory of the agent may take, of which 1 is one after each step, from the first one on.
"""

import json
import os
from pathlib import Path

import torch
from torch import nn

from adascale import ElasticTrainer
from adascale_worker.program import weight_checks
from adascale_worker.state import state as state_module
from support.records import StepRecords, digest
from support.training import samples

if "COMPARISON_INTERVAL" in os.environ:
    weight_checks.COMPARISON_INTERVAL = float(os.environ["COMPARISON_INTERVAL"])
if "SNAPSHOT_SHARE" in os.environ:
    state_module.SNAPSHOT_SHARE = float(os.environ["SNAPSHOT_SHARE"])
    state_module.SNAPSHOT_DELAY = 0.0

trainer = ElasticTrainer(**json.loads(os.environ.get("BOUNDS", '{"batch_size": 8}')))
torch.manual_seed(2 + trainer.rank)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)).to(trainer.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
state = trainer.program_reentry(model, optimizer, scheduler)
records = StepRecords(trainer, os.environ.get("ADASCALE_REPLICA", str(trainer.rank)))
finish_file = os.environ.get("FINISH_FILE")
fails_at = int(os.environ.get("FAIL_AT", "-1"))

for epoch in range(state.epoch, int(os.environ.get("EPOCHS", "2"))):
    if finish_file and Path(finish_file).exists():
        break
    for index, x, y in records.of(trainer.dataloader(samples())):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(trainer.device)), y.to(trainer.device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        trainer.log(loss=loss)
        records.add(index, epoch=epoch)
        once = records.folder / f"failed-rank{trainer.rank}"
        fails = trainer.steps == fails_at and trainer.rank == int(os.environ.get("FAIL_RANK", "0"))
        if fails and not once.exists():
            once.touch()
            raise ArithmeticError(f"made to fail at step {trainer.steps}")
    trainer.step(epoch)

trainer.report_result(weights=digest(model.parameters()))
records.finish(model.parameters())
