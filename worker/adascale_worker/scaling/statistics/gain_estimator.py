"""Estimates the gain of an optimizer's steps: which steps are measured, and the averages over them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from adascale_core.batch.gain import GradientEstimate, default_smoothing, total
from adascale_worker.scaling.rules import ScalingRule
from adascale_worker.scaling.statistics.estimates import MovingAverages, StepEstimate
from adascale_worker.scaling.statistics.gradient_statistics import GradientStatistics
from adascale_worker.scaling.statistics.parameters import HOST
from adascale_worker.scaling.statistics.steps import GainOptions, StepSettings


class GainEstimator:
    """Measures the steps of an optimizer, and estimates the gain of each parameter group.

    For each step: the backward passes, `finish_measurement` before the optimizer uses the gradients, then
    `end_step`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: ScalingRule,
        options: GainOptions,
        model: torch.nn.Module | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.options = options
        self.statistics = GradientStatistics(optimizer, rule, options, model, grad_scaler)
        self._averages = MovingAverages.empty(0, HOST)
        self._flag_sums: Tensor | tuple[float, ...] | None = None
        self._gradients_are_finite: Tensor | None = None
        self._steps = 0
        self._sampling_start = 0
        self._is_stopped = False

    # -- options ----------------------------------------------------------------------------------------

    @property
    def settings(self) -> StepSettings:
        """How the current step is made."""
        return self.options.settings

    @property
    def smoothing(self) -> float:
        """Weight of the past in the moving average."""
        chosen = self.options.smoothing
        return default_smoothing(self.settings.scale) if chosen is None else chosen

    def change_options(self, options: GainOptions) -> None:
        """Use other options from now on. Discards what this step has measured so far."""
        self.options = options
        self.begin_step()

    def change_settings(self, **changes: Any) -> None:
        """Change fields of `settings`. Discards what this step has measured so far."""
        self.change_options(replace(self.options, settings=replace(self.settings, **changes)))

    # -- results ----------------------------------------------------------------------------------------

    def estimates(self) -> Sequence[GradientEstimate | None]:
        """Return the estimate of each parameter group, without the limit; None for a group without one.

        Includes this step as far as it is measured. There may be fewer estimates than groups.
        """
        if self.statistics.parameters.lr_device == HOST:
            self.statistics.loss_scale.warn_if_unknown()
        return self._current_averages().on_host()

    def total_estimate(self) -> GradientEstimate | None:
        """Return the estimate of all parameter groups that are trained; None without any."""
        groups = zip(self.estimates(), self.statistics.parameters.trained(), strict=False)
        available = [estimate for estimate, is_trained in groups if is_trained and estimate is not None]
        return self._limited(total(available)) if available else None

    def gain(self, scale: float, group: int | None = None) -> float:
        """Return the gain at `scale`, of a group or of all that are trained; 1 without an estimate."""
        if group is None:
            estimate = self.total_estimate()
        else:
            groups = len(self._optimizer.param_groups)
            if not -groups <= group < groups:
                raise IndexError(f"got pg_idx={group}; there are {groups} parameter groups")
            estimates = self.estimates()
            number = group % groups
            estimate = self._limited(estimates[number]) if number < len(estimates) else None
        return 1.0 if estimate is None else estimate.gain(scale)

    def gain_tensor(self) -> Tensor:
        """Return the gain of all trained groups together: shape (), on the device of learning rates."""
        parameters = self.statistics.parameters
        averages = self._current_averages().to(parameters.lr_device)
        gain = averages.gain(self.settings.scale, parameters.trained_tensor()[: averages.groups])
        return self._limited_gains(gain)

    def group_gains(self) -> Sequence[float | Tensor]:
        """Return the gain of each group with averages: tensors if the learning rates are on the device."""
        if self.statistics.parameters.lr_is_on_device:
            return self._limited_gains(self._averages.gains(self.settings.scale)).unbind()
        limited = map(self._limited, self.estimates())
        return [1.0 if estimate is None else estimate.gain(self.settings.scale) for estimate in limited]

    def flag_sums(self) -> tuple[float, ...] | None:
        """Return the sums of flags over ranks that came with the last step; None without any."""
        if isinstance(self._flag_sums, Tensor):
            count = self._flag_sums.numel()
            if self.statistics.parameters.lr_is_on_device:
                # Read together with the averages, which the program reads next: waits for the device once.
                numbers = torch.cat([self._flag_sums, self._averages.packed()]).tolist()
                self._averages.set_host_numbers(numbers[count:])
            else:  # the step has already read the averages
                numbers = self._flag_sums.tolist()
            self._flag_sums = tuple(numbers[:count])
        return self._flag_sums

    def gradients_are_finite(self) -> bool | None:
        """Return whether the gradients of the last step were finite; None if it was not measured."""
        return None if self._gradients_are_finite is None else bool(self._gradients_are_finite)

    # -- a step -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Prepare for the next step. Discards what this step has measured so far."""
        sampling, step = self.options.sampling, self._steps - self._sampling_start
        is_single = self.settings.micro_gradients == 1
        is_measured = sampling.is_in_measured_pair if is_single else sampling.is_measured
        self.statistics.begin_step(
            self.settings,
            self._steps,
            measuring=not self._is_stopped
            and (self.settings.interval > 0 or is_measured(step, self.smoothing)),
            begins_pair=is_single and sampling.begins_pair(step, self.smoothing),
        )

    def finish_measurement(self) -> None:
        """Add the estimates of this step to the averages. Call before the optimizer uses the gradients."""
        self.statistics.parameters.record_trainable()
        measurement = self.statistics.finish_step()
        self._averages = self._averages.to(self.statistics.parameters.lr_device)
        if measurement.estimate is not None:
            self._averages = self._updated_averages(measurement.estimate)
        self._gradients_are_finite = measurement.finite
        is_single = self.settings.world_size == 1
        self._flag_sums = tuple(self.statistics.flags) if is_single else measurement.flag_sums

    def end_step(self) -> None:
        """Count a step that the optimizer has made, and prepare for the next."""
        if not self.statistics.is_excluded_from_join():
            self._steps += 1
        self.begin_step()

    def end_step_without_data(self) -> None:
        """Take part in a step of peers, on a rank that has no more data."""
        self.statistics.join_all_reduce()
        self._steps += 1
        self.begin_step()

    def restart_sampling(self) -> None:
        """Measure all of the next steps, as at the start, because the parameters have changed."""
        self._sampling_start = self._steps
        self.begin_step()

    def restart_groups(self, groups: Sequence[int]) -> None:
        """Discard the averages of some groups, whose parameters have changed, and leave this step out."""
        self._averages = self._averages.without(groups)
        self.statistics.parameters.record_trainable()
        self._sampling_start = self._steps
        self.statistics.leave_out_step()

    def stop(self) -> None:
        """Remove all hooks from the parameters. The gain does not change from then on."""
        self.statistics.remove_hooks()
        self._is_stopped = True

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a restart, as tensors and numbers. Options are not in it."""
        self.statistics.loss_scale.warn_if_unknown()  # may wait for the device
        return {
            "steps": self._steps,
            "sampling_start": self._sampling_start,
            "averages": self._averages.state_dict(),
            "statistics": self.statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None for the state without any step."""
        if state is None:
            state = {
                "steps": 0,
                "sampling_start": 0,
                "averages": [],
                "statistics": {"loss_scale": 1.0, "previous_gradient": None},
            }
        self._steps = state["steps"]
        self._sampling_start = state["sampling_start"]
        self._averages = MovingAverages.from_state_dict(state["averages"], HOST)
        self.statistics.load_state_dict(state["statistics"])
        self.begin_step()

    # -- inside -----------------------------------------------------------------------------------------

    def _limited(self, estimate: GradientEstimate | None) -> GradientEstimate | None:
        limit = self.options.max_gain
        return estimate if estimate is None or limit is None else estimate.limited(limit)

    def _limited_gains(self, gains: Tensor) -> Tensor:
        """As `GradientEstimate.limited`, without waiting for the device."""
        limit = self.options.max_gain
        return gains if limit is None else gains * limit / (gains + (limit - 1.0))

    def _updated_averages(self, step: StepEstimate) -> MovingAverages:
        # The estimate of a measured step stands for all the steps of an interval.
        sampling, smoothing, steps = (
            self.options.sampling,
            self.smoothing,
            self._steps - self._sampling_start,
        )
        if self.settings.interval:
            interval, smoothing = self.settings.interval, sampling.longer_smoothing(steps, smoothing)
        elif self.settings.micro_gradients == 1:
            interval = sampling.pair_interval(steps, smoothing)
        else:
            interval = sampling.interval(steps, smoothing)
        groups = len(self._optimizer.param_groups)
        averages = self._averages.to(step.grad_sqr.device).with_groups(groups)
        return averages.updated(step, smoothing**interval, debias=self.options.debias)

    def _current_averages(self) -> MovingAverages:
        """The averages with this step, as far as it is measured."""
        estimate = self.statistics.preview()
        return self._averages if estimate is None else self._updated_averages(estimate)
