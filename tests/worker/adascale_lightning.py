"""Programs for Lightning's Trainer, in a module of their own because Lightning takes seconds to import."""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from adascale_worker.adascale import AdaScale
from worker.adascale_problem import squared_error
from worker.reference import Batch


class Program(LightningModule):
    """Automatic optimization, as in docs/adascale.md."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.micro: int | None = None
        self.gains: list[float] = []

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        micro = self.micro or self.trainer.accumulate_grad_batches
        return AdaScale(sgd, scale=4.0, num_gradients_to_accumulate=micro)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return squared_error(self.network, batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gains.append(optimizer.gain())


class ManualOptimization(Program):
    """Manual optimization: the loop's optimizer is Lightning's wrapper around AdaScale."""

    def __init__(self, network: nn.Module, micro: int) -> None:
        super().__init__(network)
        self.automatic_optimization = False
        self.micro: int = micro

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        if batch_idx % self.micro == 0:
            optimizer.zero_grad()
        self.manual_backward(squared_error(self.network, batch) / self.micro)
        if (batch_idx + 1) % self.micro == 0:
            assert optimizer.gain() == optimizer.optimizer.gain()
            optimizer.step()


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
