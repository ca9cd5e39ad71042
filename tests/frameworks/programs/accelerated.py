"""A training program of Accelerate that records its steps and evaluations, with `ElasticAccelerator`.

Environment: JOURNAL, the folder of the records; EPOCHS; BOUNDS, arguments of `ElasticAccelerator` as JSON;
STEP_SECONDS, the minimum duration of a step; WAITS, the name of a replica that stays in the evaluation of
epoch 1 until it is killed; COMMUNICATES, to call what communicates in each batch, under torchrun.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader

from adascale.accelerate import ElasticAccelerator as Accelerator
from support.records import StepRecords

folder = Path(os.environ["JOURNAL"])
folder.mkdir(parents=True, exist_ok=True)
name = os.environ["REPLICA"] or os.environ["RANK"]
num_epochs = int(os.environ.get("EPOCHS", "6"))

accelerator = Accelerator(**json.loads(os.environ.get("BOUNDS", '{"batch_size": 12}')), mixed_precision="no")
torch.manual_seed(1)
features = torch.randn(48, 6)
targets = (features.sum(1) + 0.5 * torch.randn(48) > 0).long()
samples = [(index, features[index], targets[index]) for index in range(48)]
train_dataloader: DataLoader[Any] = DataLoader(
    samples,  # type: ignore[arg-type]
    shuffle=True,
    batch_size=accelerator.trainer.batch_size,
)
eval_dataloader: DataLoader[Any] = DataLoader(samples[:43], batch_size=4)  # type: ignore[arg-type]

torch.manual_seed(int(name))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
total = num_epochs * len(train_dataloader) * accelerator.num_processes
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
trainer = accelerator.trainer


def communicate(index: torch.Tensor) -> None:
    """Call what communicates over the two replicas."""
    rank = accelerator.process_index
    other = 1 - rank
    assert torch.distributed.get_rank() == rank
    mine, both = torch.tensor([rank]), [0, 1]
    assert accelerator.gather(mine).tolist() == accelerator.gather_for_metrics(mine).tolist() == both
    assert accelerator.gather_for_metrics([f"rank {rank}"], use_gather_object=True) == ["rank 0", "rank 1"]
    assert accelerator.reduce(mine.float(), "mean").tolist() == [0.5]
    assert accelerator.pad_across_processes(torch.ones(1 + rank)).tolist() == [1.0, float(rank)]
    with accelerator.split_between_processes(["a", "b"]) as own:
        assert own == ["ab"[rank]]
    assert broadcast_object_list([rank]) == [0]
    assert not accelerator.check_trigger()
    if other:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    accelerator.on_main_process(lambda: calls.append(rank))()
    accelerator.on_local_process(lambda: calls.append(rank), local_process_index=1)()
    assert len(index) == trainer.get_local_bsz()


calls: list[int] = []
records = StepRecords(trainer, name)
for epoch in accelerator.epochs(num_epochs):
    model.train()
    for index, x, y in records.of(train_dataloader):
        steps = trainer.steps
        if os.environ.get("COMMUNICATES"):
            communicate(index)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        assert accelerator.sync_gradients == (trainer.steps > steps)
        assert (accelerator.num_processes, accelerator.process_index) == (trainer.replicas, trainer.rank)
        records.add(index, epoch=epoch, loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    model.eval()
    evaluated: list[list[float]] = []
    for index, x, y in eval_dataloader:
        with torch.no_grad():
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        # Two calls, between which a replica may be lost.
        numbers = accelerator.gather_for_metrics(index)
        values = accelerator.gather(losses)
        evaluated += [[int(n), v] for n, v in zip(numbers, values.tolist(), strict=True)]
        if epoch == 1:
            (folder / f"evaluates-{name}").touch()
        if epoch == 1 and os.environ.get("WAITS") == name:
            threading.Event().wait()
    with (folder / f"evaluations-{name}").open("a") as file:
        file.write(json.dumps({"epoch": epoch, "results": sorted(evaluated)}) + "\n")
    accelerator.save_state(str(folder / "state"))
accelerator.wait_for_everyone()
accelerator.end_training()
if os.environ.get("COMMUNICATES"):
    assert calls
    assert set(calls) == {accelerator.process_index}
    accelerator.print("communicates")

records.finish(model.parameters())
