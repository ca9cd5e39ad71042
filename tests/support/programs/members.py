"""A training program that records its steps, for tests of membership.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, arguments of the trainer as JSON;
STEP_SECONDS, the minimum duration of a step; REPLICA, a name for its file; WIDTH, of the hidden layer;
KEEP_GRADIENTS, to set gradients to zero instead of None; FITS, the samples of a batch that fit into memory,
SHORT, where others fail (forward, backward, allocate, loss), after SHORT_AFTER steps, and SHORT_REPLICA, on
which replica only; PER_EPOCH, 1 to step the scheduler once per epoch; COMPILE, to compile the model, after
which a second compilation is an error; LOADER, arguments of trainer.dataloader as JSON; EVALUATES, to
evaluate after training, which ends when the trainer is "finished", or after the "epochs"; GPUS, on how many
GPUs the replicas are; SAMPLES, the length of the data set; WEIGHTED, to give each micro-batch a weight;
STREAM, to read the data set as a stream, in an order that is drawn ("plain"), with states of the data set
("states"), in "shards", or in another order on each replica ("unequal"), where EXACTLY_ONCE=0 allows this;
AUTOCAST, for bfloat16.
"""

import itertools
import json
import os
import random
import time
from typing import Any

import numpy
import torch
from torch import nn

from adascale import ElasticTrainer
from support.records import StepRecords
from support.streams import Numbers, Sharded, WithState

gpus = int(os.environ.get("GPUS", "0"))
trainer = ElasticTrainer(
    **json.loads(os.environ.get("BOUNDS", '{"batch_size": 12}')),
    device=f"cuda:{int(os.environ['REPLICA']) % gpus}" if gpus else None,
)

torch.manual_seed(1)
count = int(os.environ.get("SAMPLES", "48"))
features = torch.randn(count, 6)
targets = (features.sum(1) > 0).long()
dataset = [(index, features[index], targets[index]) for index in range(count)]

stream = os.environ.get("STREAM")


def sample(index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    return dataset[index]


short = os.environ.get("SHORT", "")
fits = int(os.environ.get("FITS", "1000000"))
if os.environ.get("SHORT_REPLICA", os.environ["REPLICA"]) != os.environ["REPLICA"]:
    short = ""


def require_memory(samples: int, place: str) -> None:
    if samples > fits and place == short and trainer.steps >= int(os.environ.get("SHORT_AFTER", "0")):
        if place == "allocate":
            torch.empty(1 << 60, dtype=torch.uint8)
        raise torch.OutOfMemoryError(f"{samples} samples do not fit")


class _BackwardMemory(torch.autograd.Function):
    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: object, *gradients: torch.Tensor) -> torch.Tensor:
        require_memory(len(gradients[0]), "backward")
        return gradients[0]


class Memory(nn.Module):
    """Raises an error for batches that do not fit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        require_memory(len(x), "forward")
        require_memory(len(x), "allocate")
        if short != "backward":
            return x
        output: torch.Tensor = _BackwardMemory.apply(x)
        return output


width = int(os.environ.get("WIDTH", "16"))
torch.manual_seed(int(os.environ["REPLICA"]))
model: nn.Module = nn.Sequential(
    nn.Linear(6, width), nn.BatchNorm1d(width), Memory(), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2)
).to(trainer.device)
if "COMPILE" in os.environ:
    torch._dynamo.config.error_on_recompile = True
    model.compile(backend="eager", dynamic=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
per_epoch = os.environ.get("PER_EPOCH") == "1"
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1 if per_epoch else 7, gamma=0.9)


class EndedEpochs:
    """Counts epochs, and is saved."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


ended = EndedEpochs()
state = trainer.program_reentry(model, optimizer, scheduler, register={"ended": ended})
records = StepRecords(trainer)
epochs = int(os.environ.get("EPOCHS", "6"))
evaluates = os.environ.get("EVALUATES")
loader = json.loads(os.environ.get("LOADER", "{}"))
data: Any = dataset
if stream:
    kinds = {"states": WithState(count), "shards": Sharded(count, 7)}
    data = kinds.get(stream, Numbers(count, shuffles=True))
    loader["map"] = sample
    loader["exactly_once"] = os.environ.get("EXACTLY_ONCE") != "0"
    if stream == "unequal":
        data.rotation = int(os.environ["REPLICA"])
for epoch in itertools.count(state.epoch) if evaluates == "finished" else range(state.epoch, epochs):
    for index, x, y in records.of(trainer.dataloader(data, **loader)):
        optimizer.zero_grad(set_to_none="KEEP_GRADIENTS" not in os.environ)
        noise = random.random() + float(numpy.random.rand())
        x, y = (x + 0.01 * noise).to(trainer.device), y.to(trainer.device)
        with torch.autocast("cpu", torch.bfloat16, enabled="AUTOCAST" in os.environ):
            loss = nn.functional.cross_entropy(model(x), y)
        require_memory(len(x), "loss")
        if "WEIGHTED" in os.environ:
            loss = trainer.weighted(loss, 100 + int(index.sum()) % 7)
        loss.backward()
        optimizer.step()
        if not per_epoch:
            scheduler.step()
        lr = optimizer.param_groups[0]["lr"]
        records.add(index, epoch=epoch, loss=loss.item(), lr=lr, ended=ended.count, time=time.monotonic())
    if per_epoch:
        scheduler.step()
    trainer.step(epoch)
    ended.count += 1
    if evaluates == "finished" and trainer.finished:
        break

if evaluates:
    model.eval()
    evaluation = trainer.evaluation(dataset, batch_size=5)
    with torch.no_grad():
        for _, x, y in evaluation:
            evaluation.add(correct=(model(x.to(trainer.device)).argmax(1).cpu() == y).sum())
    trainer.report_result(correct=float(evaluation.means["correct"]))
records.finish(model.parameters())
