"""The gain of a training program that AdaScale observes without changing it: `AdaScale(..., observe=...)`."""

import csv
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adascale_core.batch.gain import GradientEstimate
from adascale_worker.process.user_code import warn_once
from adascale_worker.scaling.statistics.gradient_statistics import GradientStatistics


@dataclass(frozen=True, slots=True)
class Observation:
    """The gain and the noise of the gradients after a step of an observed optimizer.

    Attributes:
        step: number of steps of the optimizer that were observed.
        scale: S, the batch of a step in units of the initial batch; by default, the micro-batches of a step.
        gain: how many steps with the initial batch this step is worth, 1 <= gain <= S.
        efficiency: gain / S, the progress per sample relative to the initial batch.
        noise_scale: grad_var / grad_sqr, in units of the initial batch (McCandlish et al. 2018, arXiv
            1812.06162), in the metric of the optimizer. Infinite while `grad_sqr` is not above 0.
        critical_batch: the batch with an efficiency of 1/2, in units of the initial batch: noise_scale + 2.
        grad_sqr: squared norm of the true gradient.
        grad_var: variance of a gradient of the initial batch.
        biased: whether the estimates are differences of consecutive steps (one micro-batch for each step).
    """

    step: int
    scale: float
    gain: float
    efficiency: float
    noise_scale: float
    critical_batch: float
    grad_sqr: float
    grad_var: float
    biased: bool

    @classmethod
    def of(cls, estimate: GradientEstimate, step: int, scale: float) -> "Observation":
        """Return the observation of an estimate."""
        sqr, var = max(estimate.grad_sqr, 0.0), max(estimate.grad_var, 0.0)
        noise = var / sqr if sqr > 0.0 else float("inf")
        gain = estimate.gain(scale)
        return cls(step, scale, gain, gain / scale, noise, noise + 2.0, sqr, var, estimate.biased)

    def __str__(self) -> str:
        """Return the line that is written to stderr."""
        return (
            f"adascale: step {self.step}: a batch of {self.scale:g} is worth {self.gain:.2f} steps "
            f"(efficiency {self.efficiency:.0%}), critical batch {self.critical_batch:.4g}"
        )


Report = Callable[[Observation], object]


def report_to(target: bool | str | Path | Report) -> Report:
    """Return what reports an observation: a function, a CSV file, or for True a line on stderr."""
    if callable(target):
        return target
    if isinstance(target, bool):
        return lambda observation: print(observation, file=sys.stderr, flush=True)
    path = Path(target)
    if not path.parent.is_dir():
        raise ValueError(
            f"got observe={str(target)!r}, but there is no folder {path.parent}: create it before"
        )
    warned: set[str] = set()

    def append(observation: Observation) -> None:
        try:
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, [field.name for field in fields(Observation)])
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(asdict(observation))
        except OSError as error:
            message = f"observations can not be written to {path}, and are left out: {error}"
            warn_once(warned, "file", message)

    return append


def observe(
    adascale: torch.optim.Optimizer,
    statistics: GradientStatistics,
    optimizer: torch.optim.Optimizer,
    report: Report,
    every: int,
) -> None:
    """Measure each step of an optimizer, whoever calls `step()`, and report every n-th one on rank 0."""
    steps = 0

    def before_step(
        _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inner, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            statistics.finish_measurement()
            return None

        def observed() -> Any:
            loss = closure()
            statistics.finish_measurement()
            return loss

        return (inner, observed), {name: each for name, each in kwargs.items() if name != "closure"}

    def after_step(*_: object, _kept: object = adascale) -> None:
        # `adascale` lives as long as the optimizer, since the program may keep the optimizer only.
        nonlocal steps
        statistics.end_step()
        steps += 1
        if steps % every or (dist.is_initialized() and dist.get_rank() != 0):
            return
        estimate = statistics.total_estimate()
        if estimate is not None:
            report(Observation.of(estimate, steps, statistics.options.scale))

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
