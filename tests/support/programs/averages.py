"""A program whose model normalizes its input by BatchNorm, with a moving average of the weights.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, arguments of the trainer as JSON; REPLICA, a
name for its files; STEP_SECONDS, the minimum duration of a step.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from adascale import ElasticTrainer
from support.training import samples

folder = Path(os.environ["JOURNAL"])
folder.mkdir(parents=True, exist_ok=True)
replica = os.environ["REPLICA"]
trainer = ElasticTrainer(**json.loads(os.environ["BOUNDS"]))
torch.manual_seed(int(replica))
model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = trainer.program_reentry(model, optimizer, register={"average": average})
with (folder / f"{replica}-{os.getpid()}.jsonl").open("w", buffering=1) as journal:
    indices: list[list[int]] = []
    for epoch in range(state.epoch, int(os.environ["EPOCHS"])):
        for index, x, y in trainer.dataloader(samples()):
            position = trainer.samples
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            indices.append(index.tolist())
            if trainer.made_step:
                average.update_parameters(model)
                taken = indices[-trainer.accumulation :]
                record = {
                    "step": trainer.steps,
                    "samples": [position, trainer.samples],
                    "indices": [each for batch in taken for each in batch],
                    "batches": taken,
                    "rank": trainer.rank,
                    "replicas": trainer.replicas,
                    "generation": trainer.generation,
                    "weights": [p.tolist() for p in model.parameters()],
                }
                journal.write(json.dumps(record) + "\n")
            time.sleep(float(os.environ["STEP_SECONDS"]))
        trainer.step(epoch)

result = {
    "rank": trainer.rank,
    "average": [p.tolist() for p in average.parameters()],
    "buffers": [buffer.tolist() for buffer in model.buffers()],
}
(folder / f"result-{replica}.json").write_text(json.dumps(result))
