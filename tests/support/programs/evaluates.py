"""A training program that evaluates after each epoch, for tests of membership.

Environment: JOURNAL, the folder of the results; REPLICA, a name for its file; WAITS, the name of a replica
that stays in its second evaluation until it is killed; PAUSES, the name of one that pauses before a forward
pass until it has noticed a loss.
"""

import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn

from adascale import ElasticTrainer
from support.records import digest

folder = Path(os.environ["JOURNAL"])
replica = os.environ["REPLICA"]
trainer = ElasticTrainer(batch_size=12, epochs=4)

torch.manual_seed(1)
features = torch.randn(48, 6)
dataset = [(features[index], int(features[index].sum() > 0)) for index in range(48)]

torch.manual_seed(int(replica))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

state = trainer.program_reentry(model, optimizer)
folder.mkdir(parents=True, exist_ok=True)
for epoch in range(state.epoch, 4):
    for x, y in trainer.dataloader(dataset):
        if epoch == 2 and os.environ.get("PAUSES") == replica and not (folder / "pauses").exists():
            (folder / "pauses").touch()
            while not trainer._replica.group.has_failed:
                time.sleep(0.01)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    trainer.step(epoch)
    model.eval()
    evaluation = trainer.evaluation(dataset[:43], batch_size=4)
    with torch.no_grad():
        for x, y in evaluation:
            output = model(x)
            evaluation.add(
                loss=nn.functional.cross_entropy(output, y, reduction="sum"),
                correct=(output.argmax(1) == y).sum(),
            )
            evaluation.collect({"predictions": output.argmax(1), "samples": len(y)})
            if epoch == 1:
                (folder / f"evaluates-{replica}").touch()
            if epoch == 1 and os.environ.get("WAITS") == replica:
                threading.Event().wait()
    model.train()
    with (folder / f"results-{replica}").open("a") as results:
        predictions = torch.cat([output["predictions"] for output in evaluation.outputs]).tolist()
        results.write(json.dumps([epoch, evaluation.sums | {"predictions": predictions}]) + "\n")

(folder / f"weights-{replica}-{os.getpid()}").write_text(digest(model.parameters()))
