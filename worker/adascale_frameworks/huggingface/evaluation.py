"""The evaluation of the framework, divided among the replicas.

Each replica makes the prediction steps of its batches. The framework's own loop then runs on all replicas,
over the results of all batches, so its metrics are the same on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

SAMPLES = "adascale_samples"
"""The name of the tensor of sample numbers in a batch."""


@dataclass(frozen=True)
class DividedData:
    """The data of an evaluation that can be divided."""

    dataset: Any  # has a length and items by index
    batch_size: int  # samples of a batch
    drop_last: bool  # whether an incomplete last batch does not count
    options: dict[str, Any]


def divided(source: DataLoader[Any]) -> DividedData | None:
    """Return the data of a loader, or None if its batches are not those of consecutive samples."""
    batches = getattr(source, "batch_sampler", None)
    if not isinstance(batches, BatchSampler) or not isinstance(
        batches.sampler, (SequentialSampler, LengthGroupedSampler)
    ):
        return None
    if not len(source.dataset):  # type: ignore[arg-type]
        return None
    options: dict[str, Any] = {
        "collate_fn": source.collate_fn,
        "num_workers": source.num_workers,
        "pin_memory": source.pin_memory and torch.cuda.is_available(),
        "worker_init_fn": source.worker_init_fn,
    }
    if source.num_workers:
        options["prefetch_factor"] = source.prefetch_factor
        options["multiprocessing_context"] = source.multiprocessing_context
    return DividedData(source.dataset, batches.batch_size, batches.drop_last, options)


class RecordedResults:
    """The results of the prediction steps of a whole evaluation."""

    def __init__(self, results: list[Any], inputs: list[dict[str, Any]], batch_size: int) -> None:
        self._results = results
        self._inputs = inputs
        self._batch_size = batch_size

    def loader(self, data: DividedData) -> DataLoader[Any]:
        """Return a loader of batches for the framework's loop, which have the sizes of the real ones."""
        return DataLoader(
            _Numbers(len(data.dataset)),  # type: ignore[arg-type]
            batch_size=self._batch_size,
            drop_last=data.drop_last,
            collate_fn=self._batch,
        )

    def _batch(self, samples: list[int]) -> dict[str, Any]:
        return {SAMPLES: torch.tensor(samples), **self._inputs[samples[0] // self._batch_size]}

    def of(self, batch: dict[str, Any], device: torch.device) -> Any:
        """Return the result of a prediction step, on the device."""
        return _on_device(self._results[int(batch[SAMPLES][0]) // self._batch_size], device)


class _Numbers:
    """The data set of the numbers of samples."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(each, device) for each in value)
    if isinstance(value, dict):
        return {key: _on_device(each, device) for key, each in value.items()}
    return value
