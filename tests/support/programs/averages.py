"""A program whose model normalizes its input by BatchNorm, with a moving average of the weights.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, arguments of the trainer as JSON; REPLICA, a
name for its files; STEP_SECONDS, the minimum duration of a step.
"""

import json
import os

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adascale import ElasticTrainer
from support.records import StepRecords
from support.training import samples

replica = os.environ["REPLICA"]
trainer = ElasticTrainer(**json.loads(os.environ["BOUNDS"]))
torch.manual_seed(int(replica))
model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = trainer.program_reentry(model, optimizer, register={"average": average})
records = StepRecords(trainer)
for epoch in range(state.epoch, int(os.environ["EPOCHS"])):
    for index, x, y in records.of(trainer.dataloader(samples())):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if trainer.made_step:
            average.update_parameters(model)
        records.add(index, weights=[p.tolist() for p in model.parameters()])
    trainer.step(epoch)

result = {
    "rank": trainer.rank,
    "average": [p.tolist() for p in average.parameters()],
    "buffers": [buffer.tolist() for buffer in model.buffers()],
}
(records.folder / f"result-{replica}.json").write_text(json.dumps(result))
