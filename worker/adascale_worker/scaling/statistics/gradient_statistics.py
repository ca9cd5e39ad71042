"""Measures the steps of an optimizer, and estimates the gain: from backward passes to moving averages."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Joinable

from adascale_core.batch.gain import GradientEstimate, total
from adascale_worker.process.user_code import OneTimeWarnings
from adascale_worker.scaling.rules import ScalingRule
from adascale_worker.scaling.statistics.all_reduce import (
    ReducedStatistics,
    StatisticsAllReduce,
    joins_without,
)
from adascale_worker.scaling.statistics.estimates import (
    MovingAverages,
    StepEstimate,
    from_consecutive_gradients,
    from_micro_gradients,
)
from adascale_worker.scaling.statistics.loss_scale import LossScale
from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.parameters import HOST, OptimizerParameters
from adascale_worker.scaling.statistics.previous_gradient import PreviousGradient, PreviousStep
from adascale_worker.scaling.statistics.reader import GradientReader, HookedGradients
from adascale_worker.scaling.statistics.sharded import ShardedGradients
from adascale_worker.scaling.statistics.steps import (
    GainOptions,
    StepWeights,
    require_valid,
    sampling_interval,
)
from adascale_worker.torch_private.distributed import is_fully_sharded


class GradientStatistics:
    """Measures the steps of an optimizer, and estimates the gain of each parameter group.

    For each step: the backward passes, `finish_measurement` before the optimizer uses the gradients, then
    `end_step`.
    """

    def __init__(
        self,
        rule: ScalingRule,
        options: GainOptions,
        model: torch.nn.Module | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        require_valid(options)
        self.options = options
        self.rule = rule
        shards, observes_shards = options.shards, is_fully_sharded(model)
        self.parameters = OptimizerParameters(
            rule.optimizer,
            scales_lr_alone=not rule.has_second_moments,
            is_sharded=observes_shards or shards is not None,
        )
        add_shards = shards.add_shards if shards is not None else dist.all_reduce if observes_shards else None
        self._metric = Metric(rule, add_shards)
        own = self.parameters, options, self._metric
        self.reader = GradientReader(*own)
        if options.observes_backward:
            kind = ShardedGradients if observes_shards else HookedGradients
            self.reader = kind(*own, model, self._on_pass_start, self._on_pass_end)
        self.flags: Sequence[float] = ()
        """Numbers of this rank that are summed over ranks together with the statistics: of the same length on
        all ranks, and read when the last backward pass of a measured step ends."""
        self.joinable: Joinable | None = None
        """The object that represents the statistics in a `Join` context."""
        self.gradients_are_divided = False
        """Whether the gradients were divided by `divisor` since the last backward pass."""
        self.loss_scale = LossScale(grad_scaler, self.parameters)
        self._scale_of_scaler: float | None = None
        self._averages = MovingAverages.empty(0, HOST)
        self._steps = self._sampling_start = 0
        self._is_stopped = self._is_measuring = self._is_left_out = self._begins_pair = False
        self._weights: StepWeights | None = None
        self._all_reduce: StatisticsAllReduce | None = None
        self._last: ReducedStatistics | None = None
        """The numbers of the last step; None if it was not measured."""
        self._flag_sums: Tensor | tuple[float, ...] | None = None
        self._previous_gradient = PreviousGradient(self._metric)
        self._previous_step: PreviousStep | None = None
        self._warnings = OneTimeWarnings()

    def change_options(self, **changes: Any) -> None:
        """Change some options, if they are others. Discards what this step has measured so far then."""
        options = replace(self.options, **changes)
        if options != self.options:
            require_valid(options)
            self.options = options
            self.begin_step()

    # -- results ----------------------------------------------------------------------------------------

    def estimates(self) -> Sequence[GradientEstimate | None]:
        """Return the estimate of each parameter group, without the limit; None for a group without one.

        Includes this step as far as it is measured. There may be fewer estimates than groups.
        """
        if self.parameters.lr_device == HOST:
            self.loss_scale.warn_if_unknown()
        return self._current_averages().on_host()

    def total_estimate(self) -> GradientEstimate | None:
        """Return the estimate of all parameter groups that are trained; None without any."""
        groups = zip(self.estimates(), self.parameters.trained(), strict=False)
        available = [estimate for estimate, is_trained in groups if is_trained and estimate is not None]
        return self._limited(total(available)) if available else None

    def gain(self, scale: float, group: int | None = None) -> float:
        """Return the gain at `scale`, of a group or of all that are trained; 1 without an estimate."""
        if group is None:
            estimate = self.total_estimate()
        else:
            groups = len(self.parameters.groups())
            if not -groups <= group < groups:
                raise IndexError(f"got pg_idx={group}; there are {groups} parameter groups")
            estimates = self.estimates()
            number = group % groups
            estimate = self._limited(estimates[number]) if number < len(estimates) else None
        return 1.0 if estimate is None else estimate.gain(scale)

    def gain_tensor(self) -> Tensor:
        """Return the gain of all trained groups together: shape (), on the device of learning rates."""
        averages = self._current_averages().to(self.parameters.lr_device)
        trained = self.parameters.trained_tensor()[: averages.groups]
        return self._limited_gains(averages.gain(self.options.scale, trained))

    def group_gains(self) -> Sequence[float | Tensor]:
        """Return the gain of each group with averages: tensors if the learning rates are on the device."""
        if self.parameters.lr_is_on_device:
            return self._limited_gains(self._averages.gains(self.options.scale)).unbind()
        limited = map(self._limited, self.estimates())
        return [1.0 if estimate is None else estimate.gain(self.options.scale) for estimate in limited]

    def flag_sums(self) -> tuple[float, ...] | None:
        """Return the sums over ranks of `flags`, as they were when the all-reduce of the last step began.

        The same on all ranks. None if the last step had no all-reduce, or no flags in it. With one replica,
        the local flags.
        """
        if isinstance(self._flag_sums, Tensor):
            self._flag_sums = tuple(self._flag_sums.tolist())
        return self._flag_sums

    def gradients_are_finite(self) -> bool | None:
        """Return whether the gradients of the last step were finite after its backward passes, on all ranks.

        None if it was not measured.
        """
        return None if self._last is None else bool(self._last.finite)

    @property
    def awaits_comparison(self) -> bool:
        """Whether the gradient of the last step is kept for a comparison that ends with this step."""
        return self._previous_gradient.step is not None and not self._begins_pair

    # -- a step -----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Prepare for a step: add hooks to the parameters if it is measured, remove them if not.

        Discards what this step has measured so far.
        """
        options = self.options
        is_single = options.micro_gradients == 1
        place = (self._steps - self._sampling_start) % self._interval()
        is_sampled = options.compares_steps and place <= 1 if is_single else place == 0
        self._is_measuring = not self._is_stopped and (options.interval > 0 or is_sampled)
        self._begins_pair = is_single and options.compares_steps and place == 0
        self._is_left_out = False
        self.discard_step()
        self._metric.begin_step()
        if not (is_single and self._is_measuring):
            self._previous_gradient.clear()
        if self._is_measuring:
            self.reader.observe(options)
        else:
            self.reader.remove_hooks()

    def _interval(self) -> int:
        """The number of steps for which the measurement of this step stands, if the sampling chooses it."""
        options = self.options
        interval = options.sample_every
        if interval is None:
            interval = sampling_interval(self._steps - self._sampling_start, options.smoothing)
        return max(interval, 2) if options.disjoint_pairs and options.micro_gradients == 1 else interval

    def discard_step(self) -> None:
        """Discard what this step has measured so far, because its gradients were deleted."""
        self.gradients_are_divided = False
        self._discard_passes()

    def _discard_passes(self) -> None:
        self._weights = None
        all_reduce, self._all_reduce = self._all_reduce, None
        if all_reduce is not None:
            self._previous_gradient.clear()
            all_reduce.wait()
        self.reader.begin_step(measuring=self._is_measuring)

    def leave_out_step(self) -> None:
        """Leave this step out of the estimates, because its micro-gradients or its parameters are others."""
        self._is_left_out = True
        self._previous_gradient.clear()
        self.loss_scale.forget_gradients()

    def weigh_step(self, weights: StepWeights) -> None:
        """Use the weights of the micro-batches of this step. Call after its last backward pass."""
        # With weights w_i and gradients g_i of n micro-batches on K replicas, the gradient of the step is
        # G = sum(w_i g_i) / sum(w_i). If the noise of g_i is in inverse proportion to w_i, the formulas of
        # `docs/adascale.md` hold with M = |G|^2 and L = sum(w_i |g_i|^2) / sum(w_i).
        self._weights = weights

    @property
    def divisor(self) -> float:
        """The divisor of the sum over the backward passes of a step, if the loss is not scaled."""
        return float(self.options.accumulation) if self._weights is None else self._weights.divisor

    @property
    def reads_gradients(self) -> bool:
        """Whether the micro-gradients of this step are read."""
        return self._is_measuring and self.options.micro_gradients > 1

    def measure(self, weight: float) -> None:
        """Measure the step, after the micro-gradient that completes it was read. A collective call.

        `.grad` is the sum over the micro-batches of the gradient averaged over ranks. Not in place of an
        earlier measurement of the same step, unless it was discarded.
        """
        self.reader.end_last(weight)
        if self._is_measuring:
            self._measure()

    def discard_measurement(self) -> None:
        """Discard what `measure` has measured, but not the micro-gradients before."""
        self.gradients_are_divided = False
        all_reduce, self._all_reduce = self._all_reduce, None
        if all_reduce is not None:
            all_reduce.wait()
        self.reader.discard_last()

    def discard_comparison(self) -> None:
        """Discard the gradient of the last step, because the next is not made by one replica alone."""
        self._previous_gradient.clear()

    def exchange(self) -> None:
        """Start the all-reduce of a measured step if it has not started, and wait for it.

        On a GPU, what is launched from now on waits. `finish_measurement` does so too.
        """
        if not self._is_measuring or self.is_excluded_from_join():
            return
        if self._all_reduce is None:
            self._measure()
        if self._all_reduce is not None:
            self._all_reduce.wait()

    def finish_measurement(self) -> None:
        """Add the estimates of this step to the averages. Call before the optimizer uses the gradients."""
        self.parameters.record_trainable()
        self._averages = self._averages.to(self.parameters.lr_device)
        self._last = None
        if self._is_measuring and not self.is_excluded_from_join():
            self.exchange()
            all_reduce, self._all_reduce = self._all_reduce, None
            if all_reduce is not None:
                self._last, estimate = self._finish(all_reduce)
                if estimate is not None:
                    self._averages = self._updated_averages(estimate)
        sums = None if self._last is None or not self._last.flags.numel() else self._last.flags
        self._flag_sums = tuple(self.flags) if self.options.world_size == 1 else sums

    def _finish(self, all_reduce: StatisticsAllReduce) -> tuple[ReducedStatistics, StepEstimate | None]:
        """Return the numbers of this step, and its estimate; None if it has none."""
        if self._is_left_out:
            # Gradients that were measured may be deleted since.
            self._previous_gradient.clear()
            return all_reduce.result(self.parameters.lr_device), None
        problem = self.reader.synchronisation_problem()
        if problem is not None and self.options.micro_gradients > 1:
            self._warnings.warn("sharded", f"{problem}. Until then such steps are left out of the estimates")
        before_step = None
        if self.options.observes_backward and not self.loss_scale.gradients_are_unchanged():
            divisor = self.divisor if self.gradients_are_divided else 1.0
            before_step = self.reader.current_sqr_norms() * divisor**2
        statistics = all_reduce.result(self.parameters.lr_device, before_step)
        statistics, loss_scale = self._with_loss_scale(statistics)
        estimate = self._estimate(statistics, loss_scale)
        if self._previous_gradient.is_from(self._steps):
            self._previous_gradient.step = PreviousStep(statistics.averaged, self.options.scale, loss_scale)
        elif not self._begins_pair:
            self._previous_gradient.invalidate()
        return statistics, estimate

    def end_step(self) -> None:
        """Count a step that the optimizer has made, and prepare for the next."""
        if not self.is_excluded_from_join():
            self._steps += 1
        self.begin_step()

    def end_step_without_data(self) -> None:
        """Take part in the all-reduce of peers that still have data, on a rank without; they leave it out."""
        if self._is_measuring and self.options.world_size > 1:
            zeros = torch.zeros(len(self.parameters.groups()), **self.parameters.statistics_options)
            self._start_all_reduce(zeros, zeros, complete=False)
        self._steps += 1
        self.begin_step()

    def is_excluded_from_join(self) -> bool:
        """Whether the model takes uneven inputs without AdaScale, so that peers may be without data."""
        if not joins_without(self.reader.ddp, self.joinable):
            return False
        self._warnings.warn(
            "join",
            "the model takes uneven inputs and AdaScale does not. It measures nothing, since its all-reduce "
            "would wait for ranks without data. Use `with Join([model, optimizer]):` of "
            "torch.distributed.algorithms.join instead of `with model.join():`",
        )
        return True

    def restart_sampling(self) -> None:
        """Measure all of the next steps, as at the start, because the parameters have changed."""
        self._sampling_start = self._steps
        self.begin_step()

    def restart_groups_of(self, parameters: Iterable[Tensor]) -> None:
        """Estimate the gradients of the groups of parameters from the beginning, as they were (un)frozen.

        This step is left out of the estimates, since it may have begun.
        """
        changed = set(map(id, parameters))
        groups = [n for n, group in enumerate(self.parameters.groups()) if changed & set(map(id, group))]
        if groups:
            self._averages = self._averages.without(groups)
            self.parameters.record_trainable()
            self._sampling_start = self._steps
            self.leave_out_step()

    def stop(self) -> None:
        """Remove all hooks from the parameters. The gain does not change from then on."""
        self._is_stopped, self._is_measuring = True, False
        self._discard_passes()
        self.reader.remove_hooks()

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must survive a restart, as tensors and numbers. Options are not in it."""
        self.loss_scale.warn_if_unknown()  # may wait for the device
        return {
            "steps": self._steps,
            "sampling_start": self._sampling_start,
            "averages": self._averages.state_dict(),
            "statistics": {
                "loss_scale": self.loss_scale.inferred.item(),
                "previous_gradient": self._previous_gradient.state_dict(),
            },
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None for the state without any step."""
        own = {"loss_scale": 1.0, "previous_gradient": None}
        state = state or {"steps": 0, "sampling_start": 0, "averages": [], "statistics": own}
        self._discard_passes()
        self._steps, self._sampling_start = state["steps"], state["sampling_start"]
        self._averages = MovingAverages.from_state_dict(state["averages"], HOST)
        own = state["statistics"]
        self.loss_scale.inferred = torch.tensor(own["loss_scale"], dtype=torch.float64)
        self._previous_gradient.load_state_dict(own["previous_gradient"], self.parameters.measured())
        self.begin_step()

    # -- measuring --------------------------------------------------------------------------------------

    def _on_pass_start(self) -> None:
        # A GradScaler skips the step after gradients that are not finite, so this pass begins a new step.
        if self._all_reduce is not None and not self._all_reduce.result(self.parameters.lr_device).finite:
            self._discard_passes()
            self.reader.mark_incomplete()

    def _on_pass_end(self) -> None:
        if self.reader.passes == self.options.accumulation and not self.is_excluded_from_join():
            self._measure()

    def _measure(self) -> None:
        """Read the averaged gradients, and start the all-reduce."""
        averaged = self.reader.averaged_sqr_norms()
        is_single = self.options.micro_gradients == 1
        summed = self._compare_with_previous() if is_single else self.reader.sum_of_sqr_norms()
        self._scale_of_scaler = self.loss_scale.from_scaler()
        complete = is_single or self.reader.has_read_all
        if self.options.observes_backward:
            self.loss_scale.record_gradients()
        self._start_all_reduce(summed, averaged, complete=complete)

    def _compare_with_previous(self) -> Tensor:
        """Return the inner products with the previous gradient, shape (groups,).

        Copies the current gradient if the next step is compared with it.
        """
        groups = self.parameters.measured()
        self._previous_step = self._previous_gradient.preceding(self._steps, groups)
        if self._previous_step is None:
            products = torch.zeros(len(groups), **self.parameters.statistics_options)
        else:
            products = self._previous_gradient.inner_products(groups, self.parameters.device)
        if self._begins_pair:
            self._previous_gradient.copy_from(groups, step_number=self._steps)
        return products

    def _start_all_reduce(self, summed: Tensor, averaged: Tensor, *, complete: bool) -> None:
        if self._all_reduce is not None:
            self._all_reduce.wait()
        self._all_reduce = StatisticsAllReduce(
            summed,
            averaged,
            self.flags,
            complete=complete,
            ranks=self.options.world_size,
            same_on_all_ranks=not self.parameters.is_sharded,
            process_group=self.reader.process_group,
            shards=self.options.shards,
        )

    @contextmanager
    def own_change_of_gradients(self) -> Iterator[None]:
        """A change of the gradients inside is not taken for one that the program has made."""
        is_unchanged = self._all_reduce is not None and self.loss_scale.gradients_are_unchanged()
        yield
        if is_unchanged:
            self.loss_scale.record_gradients()

    def _with_loss_scale(self, statistics: ReducedStatistics) -> tuple[ReducedStatistics, Tensor]:
        """Return the statistics of the averaged gradients, and their loss scale.

        The loss scale has the shape (), and is NaN if it cannot be determined.
        """
        averaged, before_step = statistics.averaged, statistics.before_step
        given = torch.full_like(averaged[0], self._scale_of_scaler or 1.0)
        if before_step is None:
            if self._scale_of_scaler is None:
                self.loss_scale.inferred = torch.ones_like(averaged[0])  # nothing was unscaled
            return statistics, given
        if self._scale_of_scaler is not None or self.reader.is_compressed or self.parameters.is_sharded:
            loss_scale = given
        else:
            # Where ranks disagree, the program averages gradients itself after backward. The gradients before
            # the step are the mean then, and give no information about the loss scale.
            after_backward = torch.where(statistics.agreed, averaged.sum(), before_step.sum())
            loss_scale = self.loss_scale.infer(after_backward, before_step.sum())
        averaged = torch.where(statistics.agreed, averaged, before_step)
        return replace(statistics, averaged=averaged, agreed=torch.ones_like(statistics.agreed)), loss_scale

    # -- estimates --------------------------------------------------------------------------------------

    def _estimate(self, statistics: ReducedStatistics, loss_scale: Tensor) -> StepEstimate | None:
        is_single = self.options.micro_gradients == 1
        if is_single:
            is_empty = self._weights is not None and self._weights.positive == 0
            if is_empty or not self._has_expected_passes():
                # What was read is the gradient of the first passes only, or of no valid samples.
                self._previous_gradient.invalidate()
                return None
            if self._previous_step is None:
                return None
            numbers = self._from_difference(statistics, loss_scale, self._previous_step)
        else:
            if (count := self.reader.micro_gradients) < 2 or not self._has_expected_passes():
                return None
            if self._weights is not None and self._weights.positive < 2:
                return None
            numbers = self._from_micro_gradients(statistics, loss_scale, count)
        valid = statistics.complete & statistics.agreed & statistics.finite
        valid = valid & torch.isfinite(numbers[0] + numbers[1])
        valid = valid & self.parameters.has_trainable(valid.device)
        defined = self._metric.defined_groups()
        if defined is not None:
            groups = range(len(self.parameters.groups()))
            valid = valid & torch.tensor([group in defined for group in groups], device=valid.device)
        return StepEstimate(*numbers, valid, biased=is_single)

    def _has_expected_passes(self) -> bool:
        passes = self.reader.passes
        if passes in (0, self.options.accumulation):
            return True
        self._warnings.warn(
            "passes",
            f"got {passes} backward passes in a step, where {self.options.accumulation} are expected: such "
            "steps are left out of the estimates, so the gain is not measured. Add up the losses of a batch, "
            "and call backward() once. Only a loop without ElasticTrainer accumulates gradients itself, and "
            "calls AdaScale.set_num_gradients_to_accumulate() and AdaScale.set_scale() with its numbers",
        )
        return False

    def _from_micro_gradients(
        self, statistics: ReducedStatistics, loss_scale: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        passes = self.options.accumulation
        count_of_rank = count // self.options.world_size
        mean_of_sqr, sqr_of_mean = statistics.summed / count, statistics.averaged
        if self.options.is_scaled_loss:
            mean_of_sqr = mean_of_sqr * count_of_rank**2
        elif self._weights is not None:
            # The mean of the squares is weighted too.
            mean_of_sqr = statistics.summed / (self.options.world_size * self.divisor)
            sqr_of_mean = sqr_of_mean / self.divisor**2
            count = self._weights.positive
        else:
            mean_of_sqr = mean_of_sqr / (passes / count_of_rank) ** 2
            sqr_of_mean = sqr_of_mean / passes**2
        unit = loss_scale.square()
        return from_micro_gradients(count, mean_of_sqr / unit, sqr_of_mean / unit, self.options.scale)

    def _from_difference(
        self, statistics: ReducedStatistics, loss_scale: Tensor, previous: PreviousStep
    ) -> tuple[Tensor, Tensor]:
        previous_loss_scale = previous.loss_scale.to(loss_scale)
        product = statistics.summed / (loss_scale * previous_loss_scale)
        sqr_norm = statistics.averaged / loss_scale**2
        previous_sqr_norm = previous.sqr_norms.to(loss_scale) / previous_loss_scale**2
        sqr_of_difference = (sqr_norm + previous_sqr_norm - 2.0 * product).clamp(min=0.0)
        return from_consecutive_gradients(product, sqr_of_difference, previous.scale, self.options.scale)

    # -- averages ---------------------------------------------------------------------------------------

    def _limited(self, estimate: GradientEstimate | None) -> GradientEstimate | None:
        limit = self.options.max_gain
        return estimate if estimate is None or limit is None else estimate.limited(limit)

    def _limited_gains(self, gains: Tensor) -> Tensor:
        """As `GradientEstimate.limited`, without waiting for the device."""
        limit = self.options.max_gain
        return gains if limit is None else gains * limit / (gains + (limit - 1.0))

    def _updated_averages(self, step: StepEstimate) -> MovingAverages:
        # The estimate of a measured step stands for all the steps of an interval.
        interval, smoothing = self.options.interval, self.options.smoothing
        if interval:
            # The training loop chooses few steps: their window is a quarter of the steps so far, if that is
            # longer.
            smoothing = max(smoothing, 1.0 - 4.0 / max(self._steps - self._sampling_start, 4))
        averages = self._averages.to(step.grad_sqr.device).with_groups(len(self.parameters.groups()))
        weight = smoothing ** (interval or self._interval())
        return averages.updated(step, weight, debias=self.options.debias)

    def _current_averages(self) -> MovingAverages:
        """The averages with this step, as far as it is measured."""
        if self._all_reduce is None or self._is_left_out:
            return self._averages
        statistics = self._all_reduce.result(self.parameters.lr_device)
        loss_scale = self.loss_scale.inferred.to(statistics.averaged)
        if self._scale_of_scaler is not None:
            loss_scale = torch.full_like(statistics.averaged[0], self._scale_of_scaler)
        estimate = self._estimate(statistics, loss_scale)
        return self._averages if estimate is None else self._updated_averages(estimate)
