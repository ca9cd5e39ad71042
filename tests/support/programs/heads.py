"""The cases of `support.heads` on two replicas; each writes its results to OUT/rank<rank>.pt."""

import os
from pathlib import Path
from typing import Any

import torch

from adascale import ElasticTrainer
from support.heads import CASES, Heads

OUT = Path(os.environ["OUT"])
results: dict[str, Any] = {}
for name, (arguments, heads_of) in CASES.items():
    trainer = ElasticTrainer(**arguments)
    heads = Heads()
    heads.models["encoder"].requires_grad_("frozen at first" not in name)
    heads.enter(trainer)
    done = heads.train(trainer, heads_of, pause=0.05 if trainer.rank == 0 else 0.0)
    results[name] = {"done": done, "parameters": heads.parameters(), "progress": trainer.progress}
torch.save(results, OUT / f"rank{trainer.rank}.pt")
