"""As `members.py`, with a model that is sharded over the processes of a replica.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, arguments of the trainer as JSON;
STEP_SECONDS, the minimum duration of a step; REPLICA, a name for its files; WIDTH, of the hidden layer;
MEMORY, the samples of a batch that fit into the memory of process 1.
"""

import json
import os
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from adascale import ElasticTrainer
from support.records import StepRecords
from support.training import samples

process = os.environ.get("ADASCALE_LOCAL_RANK", "0")
trainer = ElasticTrainer(**json.loads(os.environ.get("BOUNDS", '{"batch_size": 12}')))
width = int(os.environ.get("WIDTH", "15"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2), nn.PReLU())
fully_shard(model[0], mesh=trainer.mesh)
fully_shard(model, mesh=trainer.mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
state = trainer.program_reentry(model, optimizer, scheduler)
records = StepRecords(trainer, f"{os.environ.get('REPLICA', '')}.{process}", trainer.mesh.size())
for epoch in trainer.epochs(int(os.environ.get("EPOCHS", "6"))):
    model.train()
    for index, x, y in records.of(trainer.dataloader(samples())):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if process == "1" and len(x) > int(os.environ.get("MEMORY", "1000")):
            raise torch.OutOfMemoryError(f"{len(x)} samples do not fit")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        gain, lr = trainer.adascale.gain(), optimizer.param_groups[0]["lr"]
        records.add(index, process=int(process), epoch=epoch, gain=gain, lr=lr, time=time.monotonic())
model.eval()
evaluation = trainer.evaluation(samples(), batch_size=5)
with torch.no_grad():
    for _, x, y in evaluation:
        evaluation.add(correct=(model(x).argmax(1) == y).sum())
trainer.report_result(correct=float(evaluation.means["correct"]))
parameters: list[Any] = list(model.state_dict().values())
records.finish([parameter.full_tensor() for parameter in parameters])
