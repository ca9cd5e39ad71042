"""Programs for Lightning's Trainer, in a module of their own because Lightning takes seconds to import."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from adascale_worker.adascale import AdaScale
from worker.adascale_problem import squared_error
from worker.reference import Batch

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass
class Options:
    """The options that the tests vary.

    Attributes:
        adascale: additional arguments of AdaScale.
        scheduler: makes the scheduler that Lightning advances.
        by_progress: advance the scheduler by gains instead of by steps.
        max_progress: the progress to stop at.
    """

    adascale: dict[str, Any] = field(default_factory=dict)
    scheduler: MakeScheduler | None = None
    by_progress: bool = False
    max_progress: float = math.inf


class Program(LightningModule):
    """Automatic optimization, as in docs/adascale.md."""

    def __init__(self, network: nn.Module, options: Options | None = None) -> None:
        super().__init__()
        self.network = network
        self.options = options or Options()
        self.progress = 0.0
        self.gains: list[float] = []
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        micro = self.trainer.accumulate_grad_batches
        optimizer = AdaScale(
            sgd,
            **{"scale": 4.0, "num_gradients_to_accumulate": micro, **self.options.adascale},
        )
        if self.options.scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.options.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return squared_error(self.network, batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gains.append(optimizer.gain())
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.progress += optimizer.gain()
        if self.progress >= self.options.max_progress:
            self.trainer.should_stop = True

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if not self.options.by_progress:
            super().lr_scheduler_step(scheduler, metric)
            return
        while scheduler.last_epoch < int(self.progress):
            scheduler.step()


class ManualOptimization(Program):
    """Manual optimization: the loop's optimizer is Lightning's wrapper around AdaScale."""

    def __init__(self, network: nn.Module, micro: int, options: Options | None = None) -> None:
        super().__init__(network, options)
        self.automatic_optimization = False
        self.micro = micro

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        if batch_idx % self.micro == 0:
            optimizer.zero_grad()
        self.manual_backward(squared_error(self.network, batch) / self.micro)
        if (batch_idx + 1) % self.micro == 0:
            assert optimizer.gain() == optimizer.optimizer.gain()
            optimizer.step()


class TwoNetworks(LightningModule):
    """Two networks, each with its optimizer; while one network is trained, the other is frozen."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.networks = nn.ModuleList(networks)
        self.gains: list[list[float]] = [[] for _ in networks]

    def configure_optimizers(self) -> Any:
        return [
            AdaScale(torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9), scale=4.0)
            for network in self.networks
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for network, optimizer, gains in zip(self.networks, optimizers, self.gains, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(squared_error(network, batch))
            gains.append(optimizer.gain())
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def trainer(**options: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def loader(data: list[Batch]) -> DataLoader[Batch]:
    """Each item is a batch."""
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]
