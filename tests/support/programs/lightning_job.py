"""A program that trains with Lightning's Trainer, and records its steps for tests of membership.

Environment: JOURNAL, the folder of the records; REPLICA, a name for its file; STRATEGY, arguments of
ElasticStrategy as JSON; TRAINER, arguments of Trainer as JSON; PACKAGE, of Lightning; STEP_SECONDS, the
minimum duration of a step; MODE, "automatic" or "manual" optimization, "several" optimizers, or "stream",
automatic optimization on data without a length; STOP_BELOW, a loss of validation below which EarlyStopping
ends training; STOP_AT, a step after which rank 0 alone requests the end, as the callback Timer may.
"""

from __future__ import annotations

import json
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adascale.lightning import ElasticStrategy
from support.records import digest
from support.streams import Items

package = os.environ.get("PACKAGE", "lightning.pytorch")
pl: Any = import_module(package)
callbacks: Any = import_module(f"{package}.callbacks")
loggers: Any = import_module(f"{package}.loggers")

BATCH_SIZE = 8
SAMPLES = 48
folder = Path(os.environ["JOURNAL"])
folder.mkdir(parents=True, exist_ok=True)
mode = os.environ.get("MODE", "automatic")
is_automatic = mode in ("automatic", "stream")
name = f"{os.environ.get('REPLICA', '0')}-{os.getpid()}"


class Data(pl.LightningDataModule):  # type: ignore[misc]
    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(SAMPLES, 6, generator=generator)
        self.samples = TensorDataset(torch.arange(SAMPLES), features, features.sum(1, keepdim=True).tanh())

    def train_dataloader(self) -> DataLoader[Any]:
        if mode == "stream":
            return DataLoader(Items(self.samples), batch_size=BATCH_SIZE)
        return DataLoader(self.samples, batch_size=BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=5)


class Module(pl.LightningModule):  # type: ignore[misc]
    counted = 0  # steps, by the callback

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = is_automatic
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        index, x, y = batch
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        self.indices = index.tolist()
        loss = nn.functional.mse_loss(self(x), y)
        self.loss = float(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if is_automatic:
            return loss
        optimizers = self.optimizers() if mode == "several" else [self.optimizers()]
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(self(x), y) * (number + 1)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        modules = [self.body, self.head] if mode == "several" else [self]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in modules]
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(each, 7, 0.9), "interval": "step"}
            for each in optimizers
        ]
        return optimizers, schedulers


class Journal(callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.file = (folder / f"{name}.jsonl").open("w", buffering=1)
        self.indices: list[int] = []
        self.start = (0, 0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        elastic = trainer.strategy.elastic_trainer
        self.start = elastic.steps, elastic.samples

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        elastic = trainer.strategy.elastic_trainer
        steps, samples = self.start
        self.indices += module.indices
        if elastic.steps == steps:
            return
        module.counted += 1
        self.write(
            step=elastic.steps,
            counted=module.counted,
            samples=[samples, elastic.samples],
            indices=self.indices[-(elastic.samples - samples) // elastic.replicas :],
            rank=elastic.rank,
            replicas=elastic.replicas,
            generation=elastic.generation,
            epoch=trainer.current_epoch,
            progress=elastic.progress,
            global_step=int(trainer.global_step),
            batch_idx=batch_idx,
            loss=float(trainer.callback_metrics["loss_step"]),
            own_loss=module.loss,
            lr=trainer.optimizers[0].param_groups[0]["lr"],
        )

        if "STOP_AT" in os.environ and elastic.is_main and elastic.steps >= int(os.environ["STOP_AT"]):
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            events = folder / f"validation-{name}"
            with events.open("a") as file:
                record = [int(trainer.global_step), float(trainer.callback_metrics["val_loss"])]
                file.write(json.dumps(record) + "\n")

    def write(self, **record: object) -> None:
        self.file.write(json.dumps(record) + "\n")


stop_below = os.environ.get("STOP_BELOW")
stops = (
    [callbacks.EarlyStopping("val_loss", stopping_threshold=float(stop_below), patience=1000)]
    if stop_below
    else []
)
trainer = pl.Trainer(
    accelerator="cpu",
    strategy=ElasticStrategy(**json.loads(os.environ.get("STRATEGY", "{}"))),
    callbacks=[
        Journal(),
        callbacks.ModelCheckpoint(filename="{step}", every_n_train_steps=10, save_top_k=-1),
        callbacks.ModelCheckpoint(monitor="val_loss", filename="best-{epoch}", save_top_k=1),
        *stops,
    ],
    logger=loggers.CSVLogger(str(folder)),
    default_root_dir=folder,
    log_every_n_steps=10,
    enable_progress_bar=False,
    enable_model_summary=False,
    **json.loads(os.environ.get("TRAINER", '{"max_epochs": 6}')),
)
module = Module()
trainer.fit(module, datamodule=Data())
(folder / f"weights-{name}").write_text(digest(module.parameters()))
