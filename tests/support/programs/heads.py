"""The cases of `support.heads` on two replicas; each writes its results to OUT/rank<rank>.pt."""

import os
from pathlib import Path
from typing import Any

import torch

from adascale import ElasticTrainer
from support.heads import CASES, Heads
from support.training import samples

OUT = Path(os.environ["OUT"])
results: dict[str, Any] = {}
for name, (arguments, heads_of) in CASES.items():
    trainer = ElasticTrainer(**arguments)
    heads = Heads()
    heads.models["encoder"].requires_grad_("frozen at first" not in name)
    heads.enter(trainer)
    done = heads.train(trainer, heads_of, pause=0.05 if trainer.rank == 0 else 0.0)
    results[name] = {"done": done, "parameters": heads.parameters(), "progress": trainer.progress}

# All replicas finish between two optimizer steps, and leave the loop after the last of them.
trainer = ElasticTrainer(batch_size=8, checkpoint_dir=OUT / "end")
heads = Heads()
heads.enter(trainer)
for _, x, y in trainer.dataloader(samples()):
    heads.zero_grad()
    heads.loss(x, y, "ab").backward()
    for name, optimizer in heads.optimizers.items():
        optimizer.step()
        if trainer.steps == 2 and name == "encoder":
            trainer.finish("no longer improves")
    if trainer.steps == 2:
        break
results["finish"] = {"parameters": heads.parameters()}
torch.save(results, OUT / f"rank{trainer.rank}.pt")
