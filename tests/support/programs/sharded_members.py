"""As `members.py`, with a model that is sharded over the processes of a replica.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, arguments of the trainer as JSON;
STEP_SECONDS, the minimum duration of a step; REPLICA, a name for its files; WIDTH, of the hidden layer;
MEMORY, the samples of a batch that fit into the memory of process 1.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from adascale import ElasticTrainer
from support.training import samples

process = os.environ.get("ADASCALE_LOCAL_RANK", "0")
folder = Path(os.environ["JOURNAL"])
trainer = ElasticTrainer(**json.loads(os.environ.get("BOUNDS", '{"batch_size": 12}')))
width = int(os.environ.get("WIDTH", "15"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2))
fully_shard(model[0], mesh=trainer.mesh)
fully_shard(model, mesh=trainer.mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.9)
state = trainer.program_reentry(model, optimizer, scheduler)
folder.mkdir(parents=True, exist_ok=True)
name = f"{os.environ.get('REPLICA', '')}.{process}-{os.getpid()}"
with (folder / f"{name}.jsonl").open("w", buffering=1) as journal:
    for epoch in trainer.epochs(int(os.environ.get("EPOCHS", "6"))):
        model.train()
        indices: list[int] = []
        for index, x, y in trainer.dataloader(samples()):
            steps, first = trainer.steps, trainer.samples
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            if process == "1" and len(x) > int(os.environ.get("MEMORY", "1000")):
                raise torch.OutOfMemoryError(f"{len(x)} samples do not fit")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            indices += index.tolist()
            if trainer.steps > steps:
                record = {
                    "step": trainer.steps,
                    "samples": [first, trainer.samples],
                    "indices": indices[-trainer.get_local_bsz() * trainer.accumulation :],
                    "rank": trainer.rank,
                    "process": int(process),
                    "replicas": trainer.replicas,
                    "generation": trainer.generation,
                    "epoch": epoch,
                    "progress": trainer.progress,
                    "gain": trainer.adascale.gain(),
                    "lr": optimizer.param_groups[0]["lr"],
                    "time": time.monotonic(),
                }
                journal.write(json.dumps(record) + "\n")
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
model.eval()
evaluation = trainer.evaluation(samples(), batch_size=5)
with torch.no_grad():
    for _, x, y in evaluation:
        evaluation.add(correct=(model(x).argmax(1) == y).sum())
trainer.report_result(correct=float(evaluation.means["correct"]))
parameters: list[Any] = list(model.state_dict().values())
weights = torch.cat([parameter.full_tensor().detach().flatten() for parameter in parameters])
(folder / f"weights-{name}").write_text(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
