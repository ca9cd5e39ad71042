"""Values that the program logs, for the reports to the metrics service."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real

import torch
from torch import Tensor

from adascale_core.names import MAX_METRICS, METRIC_NAME
from adascale_worker.errors import WorkerError


def as_number(value: object) -> int | float | None:
    """Return a number of Python or NumPy, or of an array without dimensions; None for others and tensors."""
    if not isinstance(value, Tensor) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else None


def require_metrics(values: Mapping[str, object], known: int) -> None:
    """Check what the program logs."""
    if not values:
        raise WorkerError("trainer.log() got no value: call trainer.log(loss=loss, accuracy=accuracy)")
    for name, value in values.items():
        is_tensor = isinstance(value, Tensor) and value.numel() > 0 and not value.is_complex()
        if not is_tensor and _as_float(value) is None:
            got = "an empty or complex tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            if as_number(value) is not None:
                got = "a number that no float can have"
            raise WorkerError(
                f"trainer.log() got {got} for {name}: pass a number or a tensor of real numbers"
            )
        if not re.fullmatch(METRIC_NAME, name):
            raise WorkerError(
                f"trainer.log() got the name {name!r}: use at most 64 of a-z, A-Z, 0-9 and _, and do "
                "not begin with a digit"
            )
    if known + len(values) > MAX_METRICS:
        raise WorkerError(
            f"trainer.log() got {', '.join(values)} after {known} other metrics, but a job has at most "
            f"{MAX_METRICS}, the loss included: log fewer, or use a logger of your own"
        )


def plain_result(values: Mapping[str, object]) -> dict[str, float | str]:
    """Return the result of training as values for a manifest: a number that is not finite as text."""
    return {name: _plain_value(name, value) for name, value in values.items()}


def _plain_value(name: str, value: object) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    number = int(value) if isinstance(value, bool) else as_number(value)
    if number is None:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise WorkerError(
            f"trainer.report_result() got {got} for {name}: pass a number, a tensor of one number, or a text"
        )
    return number if isinstance(number, int) or math.isfinite(number) else str(number)


def _as_float(value: object) -> float | None:
    """Return a number as a float; None for others, and for an integer beyond the range of floats."""
    number = as_number(value)
    try:
        return None if number is None else float(number)
    except OverflowError:
        return None


class LoggedMetrics:
    """Collects values by name, and returns their means. Does not synchronize with the device before that."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}
        self._means: dict[str, float] = {}

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Keep values for the next means; of a tensor of any shape, its mean."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                # A new tensor, also of a single number: the program may change its own.
                mean = value.detach().double().mean()
            else:
                mean = torch.tensor(_as_float(value), dtype=torch.float64)
            self._values.setdefault(name, []).append(mean)

    def means(self) -> dict[str, float]:
        """Return the mean of each metric since the last call, or its last mean if it was not logged since.

        A mean that is not finite is left out.
        """
        for name, mean in _means(self._values).items():
            self._means.pop(name, None)
            if math.isfinite(mean):
                self._means[name] = mean
        self._values.clear()
        return dict(self._means)

    def clear(self) -> None:
        """Discard all values and means."""
        self._values.clear()
        self._means.clear()


def _means(values: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """Return the mean of each list. Waits for each device once."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensors in values.items():
        device = tensors[-1].device
        mean = torch.stack([tensor.to(device) for tensor in tensors]).mean()
        by_device.setdefault(device, {})[name] = mean
    return {
        name: number
        for means in by_device.values()
        for name, number in zip(means, torch.stack(list(means.values())).tolist(), strict=True)
    }
