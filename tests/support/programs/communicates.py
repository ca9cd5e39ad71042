"""A training program that communicates itself, beside the trainer: a framework, metrics, groups of its own.

Each step adds a line to <JOURNAL>/<ADASCALE_REPLICA, default 0>.jsonl; FINISH_FILE ends training. Without an
agent it makes STEPS steps. METRICS=1 adds a metric of torchmetrics, whose import takes two seconds.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from adascale import ElasticTrainer
from adascale_worker.errors import WorkerError

# Before the trainer, as Hugging Face's `TrainingArguments` does.
accelerator = Accelerator(cpu=True)
trainer = ElasticTrainer(batch_size=12, local_bsz_bounds=(2, 12), device=accelerator.device)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
state = trainer.program_reentry(model, optimizer)
mean: Any = None
if os.environ.get("METRICS") == "1":
    from torchmetrics import MeanMetric

    mean = MeanMetric()
folder = Path(os.environ["JOURNAL"])
folder.mkdir(exist_ok=True)
finish = Path(os.environ.get("FINISH_FILE", "nothing"))
dataset = [(index, torch.tensor([index / 48])) for index in range(48)]

generation: int | None = None
group: Any = None
ended: Any = None
with (folder / f"{os.environ.get('ADASCALE_REPLICA', '0')}.jsonl").open("w", buffering=1) as journal:
    for epoch in range(state.epoch, 10**6):
        for index, x in trainer.dataloader(dataset):
            refusal = ""
            if trainer.generation != generation:
                if generation is not None:
                    for old in (group, ended):
                        try:
                            dist.all_reduce(torch.ones(1), group=old)
                        except WorkerError as error:
                            refusal = str(error)
                        else:
                            raise AssertionError("a group of an earlier generation was used")
                generation, group, ended = trainer.generation, dist.new_group(), trainer.replica_group
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            total = index.sum()
            dist.all_reduce(total, group=group)
            each = [torch.zeros_like(index) for _ in range(dist.get_world_size())]
            dist.all_gather(each, index)
            if mean is not None:
                mean.reset()
                mean.update(index)
            journal.write(
                json.dumps(
                    {
                        "step": trainer.steps,
                        "replicas": trainer.replicas,
                        "ranks": [dist.get_rank(), trainer.rank, trainer.replica_group.rank()],
                        "sizes": [dist.get_world_size(), trainer.replica_group.size()],
                        "indices": torch.cat(each).tolist(),
                        "total": int(total),
                        "mean": None if mean is None else float(mean.compute()),
                        "framework": [str(accelerator.distributed_type), accelerator.num_processes],
                        "refusal": refusal,
                    }
                )
                + "\n"
            )
            if finish.exists() or trainer.steps == int(os.environ.get("STEPS", "0")):
                trainer.finish("enough")
            time.sleep(0.02)
        trainer.step(epoch)
        if trainer.finished:
            break
if "STEPS" in os.environ:
    dist.destroy_process_group()
