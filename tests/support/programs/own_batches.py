"""Trains on batches of its own, as from a stream, and records its steps, for tests of membership.

Environment: JOURNAL, the folder of the records; EPOCHS; BATCHES of an epoch; STEP_SECONDS, the minimum
duration of a step; REPLICA, a name for its file.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from adascale import ElasticTrainer

folder = Path(os.environ["JOURNAL"])
folder.mkdir(parents=True, exist_ok=True)
trainer = ElasticTrainer(
    batch_size=8, max_batch_size=64, local_bsz_bounds=(8, 8), epochs=int(os.environ["EPOCHS"])
)
torch.manual_seed(int(os.environ["REPLICA"]))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = trainer.program_reentry(model, optimizer)
with (folder / f"{os.environ['REPLICA']}-{os.getpid()}.jsonl").open("w", buffering=1) as journal:
    for epoch in trainer.epochs():
        size = trainer.get_local_bsz()
        for batch in range(int(os.environ["BATCHES"])):
            generator = torch.Generator().manual_seed(hash((epoch, batch, trainer.rank)) % 2**32)
            x = torch.randn(size, 4, generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            steps = trainer.steps
            optimizer.step()
            record = {
                "step": trainer.steps,
                "made": trainer.steps > steps,
                "epoch": epoch,
                "batch": batch,
                "rank": trainer.rank,
                "replicas": trainer.replicas,
                "generation": trainer.generation,
            }
            journal.write(json.dumps(record) + "\n")
            time.sleep(float(os.environ["STEP_SECONDS"]))
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
(folder / f"weights-{os.environ['REPLICA']}-{os.getpid()}").write_text(digest)
