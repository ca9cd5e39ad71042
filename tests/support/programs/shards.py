"""Trains a small model that is sharded over the processes of a replica, and writes what it has done.

The environment selects the optimizer, the type of the reduction, clipping, weights and the batch sizes; the
process with the name of its lane writes its journal to the folder `JOURNAL`.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from adascale import ElasticTrainer
from adascale_core.checkpoint_manifest import checkpoint_number
from adascale_storage.folder import Folder
from support.training import placed_on, samples

torch.set_num_threads(1)


def network() -> nn.Sequential:
    """Return a network whose dimensions no number of processes above 1 divides."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 9), nn.Tanh(), nn.Linear(9, 2))


def end_in_a_save(number: int, process: int) -> None:
    """Kill this process, if it has this index in its replica, while it writes its file of a checkpoint."""
    write = Folder.write

    def killed(folder: Folder, name: str, parts: Any, *, size: int) -> None:
        def content() -> Any:
            for part in parts:
                yield part
                if checkpoint_number(name) == number and f"-{process + 1}-of-" in name:
                    os.kill(os.getpid(), signal.SIGKILL)

        write(folder, name, content(), size=size)

    Folder.write = killed  # type: ignore[method-assign, assignment]


def main() -> None:
    """Train, and write the steps and the final weights."""
    options = json.loads(os.environ["OPTIONS"])
    if "killed" in options:
        end_in_a_save(*options["killed"])
    trainer = ElasticTrainer(**options["trainer"])
    model = network()
    is_sharded = "ADASCALE_PROCESSES_PER_REPLICA" in os.environ
    if is_sharded:
        kwargs: dict[str, Any] = {"mesh": trainer.mesh}
        if options.get("bf16"):
            kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model[: 2 if options.get("meshes") else 4 : 2]:
            fully_shard(layer, **kwargs)
        if options.get("meshes"):
            shape = 2, trainer.mesh.size() // 2
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
            fully_shard(model[2], mesh=mesh)
            kwargs["shard_placement_fn"] = placed_on(mesh, [model[4].weight])
        fully_shard(model, **kwargs)
    matrices: list[Any] = [p for name, p in model.named_parameters() if name.endswith("weight")]
    vectors: list[Any] = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if options.get("optimizer") == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.02)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    trainer.program_reentry(model, optimizer, scheduler)
    journal = Path(os.environ["JOURNAL"])
    journal.mkdir(parents=True, exist_ok=True)
    lane = trainer._replica.group.process
    path = journal / f"{lane}-{os.getpid()}.jsonl"
    dataset = samples()
    with path.open("a") as lines:
        for _ in trainer.epochs():
            for indices, x, y in trainer.dataloader(dataset):
                optimizer.zero_grad()
                losses = nn.functional.cross_entropy(model(x).float(), y, reduction="none")
                if options.get("weighted"):
                    used = indices % 3 != 0
                    loss = trainer.weighted((losses * used).sum() / max(used.sum(), 1), used.sum())
                else:
                    loss = losses.mean()
                loss.backward()
                norm = 0.0
                if options.get("clip") and trainer.completes_step:
                    total = nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
                    norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
                before = trainer.steps
                optimizer.step()
                scheduler.step()
                record = {
                    "step": trainer.steps,
                    "made": trainer.steps > before,
                    "rank": trainer.rank,
                    "replicas": trainer.replicas,
                    "generation": trainer.generation,
                    "indices": indices.tolist(),
                    "samples": trainer.samples,
                    "gain": trainer.adascale.gain(),
                    "estimate": [trainer.adascale.grad_sqr, trainer.adascale.grad_var],
                    "norm": norm,
                }
                lines.write(json.dumps(record) + "\n")
                lines.flush()
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value)
        for name, value in model.state_dict().items()
    }
    torch.save(weights, journal / f"weights-{trainer.rank}-{lane}.pt")


if __name__ == "__main__":
    main()
