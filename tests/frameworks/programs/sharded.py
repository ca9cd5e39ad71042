"""A program of Accelerate or Lightning, plain or sharded over the processes of a replica.

Environment: FRAMEWORK; OUTPUT, the folder of its files and results; SHARDS, how it is sharded: "fsdp",
"deepspeed" or, for the plain framework, nothing.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

framework, shards = os.environ["FRAMEWORK"], os.environ.get("SHARDS", "")
output = Path(os.environ["OUTPUT"])
torch.manual_seed(1)
features = torch.randn(64, 6)
classes = (features.sum(1) > 0).long()
train_set, held_out = TensorDataset(features, classes), TensorDataset(features[:43], classes[:43])
train: Any = DataLoader(train_set, batch_size=8)
evaluated: Any = DataLoader(held_out, batch_size=8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return x + self.layer(x).relu()


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 16), Block(), Block(), nn.Linear(16, 2))


def write(rank: int, **values: Any) -> None:
    (output / f"result-{rank}").write_text(json.dumps(values))


def accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    from adascale.accelerate import ElasticAccelerator

    accelerator: Any
    if shards == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
        )
        accelerator = ElasticAccelerator(batch_size=8, fsdp_plugin=plugin)
    elif shards:
        accelerator = ElasticAccelerator(
            batch_size=8, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.5)
        )
    else:
        accelerator = Accelerator()
    (output / f"process-{accelerator.process_index}").touch(exist_ok=False)
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, train, evaluated, scheduler
    )
    losses, right, count = [], 0, 0
    for _ in accelerator.epochs(2) if shards else range(2):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if shards != "deepspeed":
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        total = accelerator.reduce(torch.tensor(2**24 + 1), "sum")
        assert total.item() == accelerator.num_processes * (2**24 + 1)
        index = torch.full((1 + accelerator.process_index,), accelerator.process_index)
        indices = accelerator.gather(accelerator.pad_across_processes(index, pad_index=9)).tolist()
        assert indices == [
            row if column <= row else 9
            for row in range(accelerator.num_processes)
            for column in range(accelerator.num_processes)
        ]
        model.eval()
        for x, y in evaluation:
            with torch.no_grad():
                found = model(x).argmax(1)
            found, expected = accelerator.gather_for_metrics((found, y))
            right, count = right + int((found == expected).sum()), count + len(found)
        accelerator.save_state(str(output / "state"))
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(state, output / "weights.pt")
    write(accelerator.process_index, losses=losses, right=right, count=count)
    accelerator.end_training()


def lightning() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import FSDPStrategy

    from adascale.lightning import ElasticStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
            self.log("train", loss, sync_dist=True, on_step=True, on_epoch=True)
            self.log("own", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            found = self.network(batch[0])
            self.log("val", nn.functional.cross_entropy(found, batch[1]))
            self.log("right", (found.argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    strategy: Any = "auto"
    if shards:
        blocks: Any = {Block}
        strategy = ElasticStrategy(
            fsdp=FSDPStrategy(auto_wrap_policy=blocks, activation_checkpointing_policy=blocks)
        )
    saved = ModelCheckpoint(output, filename="{step}", save_top_k=-1)
    # Its value, and the clock, differ from process to process.
    best = ModelCheckpoint(output / "best", filename="best", monitor="own", every_n_train_steps=3)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[saved, best],
        max_time={"days": 1},
        gradient_clip_val=0.5,
        strategy=strategy,
    )
    module = Module()
    trainer.fit(module, train, evaluated)
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "own"}
    before = trainer.validate(module, evaluated, ckpt_path=str(output / "step=8.ckpt"), weights_only=False)
    write(trainer.global_rank, **values, steps=int(trainer.global_step), before=before[0]["val"])


output.mkdir(parents=True, exist_ok=True)
{"accelerate": accelerate, "lightning": lightning}[framework]()
