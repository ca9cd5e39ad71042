"""Measures the steps of an optimizer, and estimates the gain: from backward passes to moving averages."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from adascale_core.batch.gain import GradientEstimate, total
from adascale_worker.process.user_code import warn_once
from adascale_worker.scaling.rules import ScalingRule
from adascale_worker.scaling.statistics.all_reduce import ReducedStatistics, StatisticsAllReduce
from adascale_worker.scaling.statistics.estimates import (
    MovingAverage,
    from_consecutive_gradients,
    from_micro_gradients,
    infer_loss_scale,
)
from adascale_worker.scaling.statistics.matrix_metric import MatrixMetric
from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.parameters import OptimizerParameters
from adascale_worker.scaling.statistics.previous_gradient import PreviousGradient, PreviousStep
from adascale_worker.scaling.statistics.reader import GradientReader, HookedGradients
from adascale_worker.scaling.statistics.sharded import ShardedGradients
from adascale_worker.scaling.statistics.steps import (
    GainOptions,
    StepWeights,
    require_valid,
    sampling_interval,
)
from adascale_worker.torch_private.distributed import is_fully_sharded, is_in_join

UNCHANGED = 1e-6
"""Relative difference up to which the gradients before the step are those after the backward passes."""


class GradientStatistics:
    """Measures the steps of an optimizer, and estimates the gain of each parameter group.

    For each step: the backward passes, `finish_measurement` before the optimizer uses the gradients, then
    `end_step`.
    """

    # Left out of a `torch.compile` of the step, which would be compiled again for the numbers of each step.

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
            rule.optimizer, is_sharded=observes_shards or shards is not None
        )
        add_shards = shards.add_shards if shards is not None else dist.all_reduce if observes_shards else None
        self._metric = MatrixMetric(rule) if rule.has_whole_matrices else Metric(rule, add_shards)
        own = self.parameters, options, self._metric
        self.reader = GradientReader(*own)
        if options.observes_backward:
            kind = ShardedGradients if observes_shards else HookedGradients
            self.reader = kind(*own, model, self._on_pass_start, self._on_pass_end)
        self.gradients_are_divided = False
        """Whether the gradients were divided by `divisor` since the last backward pass."""
        self._grad_scaler = grad_scaler
        self._scale_of_scaler: float | None = None
        """The loss scale of this step, if there is a GradScaler."""
        self._inferred_scale = 1.0
        self._averages: list[MovingAverage] = []
        self._steps = self._sampling_start = 0
        self._is_stopped = self._is_measuring = self._is_left_out = self._begins_pair = False
        self._weights: StepWeights | None = None
        self._all_reduce: StatisticsAllReduce | None = None
        self._last: ReducedStatistics | None = None
        """The numbers of the last step; None if it was not measured."""
        self._previous_gradient = PreviousGradient(self._metric)
        self._previous_step: PreviousStep | None = None
        self._warned: set[str] = set()

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
        return [average.estimate() for average in self._current_averages()]

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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def group_gains(self) -> list[float]:
        """Return the gain of each group with averages."""
        limited = map(self._limited, self.estimates())
        return [1.0 if estimate is None else estimate.gain(self.options.scale) for estimate in limited]

    def gradients_are_finite(self) -> bool | None:
        """Return whether the gradients of the last step were finite after its backward passes, on all ranks.

        None if it was not measured.
        """
        return None if self._last is None else self._last.finite

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
        if not self._is_measuring or self._is_in_join():
            return
        if self._all_reduce is None:
            self._measure()
        if self._all_reduce is not None:
            self._all_reduce.wait()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def finish_measurement(self) -> None:
        """Add the estimates of this step to the averages. Call before the optimizer uses the gradients."""
        self.parameters.record_trainable()
        self._last = None
        if self._is_measuring and not self._is_in_join():
            self.exchange()
            all_reduce, self._all_reduce = self._all_reduce, None
            if all_reduce is not None:
                self._last = self._finish(all_reduce)

    def _finish(self, all_reduce: StatisticsAllReduce) -> ReducedStatistics:
        """Return the numbers of this step, and add its estimates to the averages."""
        if self._is_left_out:
            # Gradients that were measured may be deleted since.
            self._previous_gradient.clear()
            return all_reduce.result()
        problem = self.reader.problem()
        if problem is not None:
            message = f"{problem}. Until then such steps are left out of the estimates"
            warn_once(self._warned, "problem", message)
        before_step = None
        if self.options.observes_backward:
            divisor = self.divisor if self.gradients_are_divided else 1.0
            before_step = self.reader.current_sqr_norms() * divisor**2
        statistics, loss_scale = self._with_loss_scale(all_reduce.result(before_step))
        self._averages = self._averages_with(statistics, loss_scale)
        if self._previous_gradient.is_from(self._steps):
            self._previous_gradient.step = PreviousStep(statistics.averaged, self.options.scale, loss_scale)
        elif not self._begins_pair:
            self._previous_gradient.invalidate()
        return statistics

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end_step(self) -> None:
        """Count a step that the optimizer has made, and prepare for the next."""
        if not self._is_in_join():
            self._steps += 1
        if not self._is_stopped:
            self._metric.end_step()
        self.begin_step()

    def _is_in_join(self) -> bool:
        """Whether the model takes uneven inputs, so that peers may be without data."""
        if self.reader.ddp is None or not is_in_join(self.reader.ddp):
            return False
        warn_once(
            self._warned,
            "join",
            "the model takes uneven inputs (`with model.join():`). AdaScale measures nothing meanwhile, as "
            "its all-reduce would wait for ranks without data: give all ranks the same number of batches",
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
            self._averages = [
                MovingAverage() if number in groups else average
                for number, average in enumerate(self._averages)
            ]
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
        return {
            "steps": self._steps,
            "sampling_start": self._sampling_start,
            "averages": [average.state_dict() for average in self._averages],
            "statistics": {
                "loss_scale": self._inferred_scale,
                "previous_gradient": self._previous_gradient.state_dict(),
                "metric": self._metric.state_dict(),
            },
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned; None for the state without any step."""
        own = {"loss_scale": 1.0, "previous_gradient": None, "metric": None}
        state = state or {"steps": 0, "sampling_start": 0, "averages": [], "statistics": own}
        self._discard_passes()
        self._steps, self._sampling_start = state["steps"], state["sampling_start"]
        self._averages = [MovingAverage.from_state_dict(each) for each in state["averages"]]
        own = state["statistics"]
        self._inferred_scale = own["loss_scale"]
        self._metric.load_state_dict(own.get("metric"))
        self._previous_gradient.load_state_dict(own["previous_gradient"], self.parameters.measured())
        self.begin_step()

    # -- measuring --------------------------------------------------------------------------------------

    def _on_pass_start(self) -> None:
        # A GradScaler skips the step after gradients that are not finite, so this pass begins a new step.
        if self._all_reduce is not None and not self._all_reduce.result().finite:
            self._discard_passes()
            self.reader.mark_incomplete()

    def _on_pass_end(self) -> None:
        if self.reader.passes == self.options.accumulation and not self._is_in_join():
            self._measure()

    def _measure(self) -> None:
        """Read the averaged gradients, and start the all-reduce."""
        averaged = self.reader.averaged_sqr_norms()
        is_single = self.options.micro_gradients == 1
        summed = self._compare_with_previous() if is_single else self.reader.sum_of_sqr_norms()
        if self._grad_scaler is not None:
            is_enabled = self._grad_scaler.is_enabled()
            self._scale_of_scaler = self._grad_scaler.get_scale() if is_enabled else 1.0
        if self._all_reduce is not None:
            self._all_reduce.wait()
        self._all_reduce = StatisticsAllReduce(
            summed,
            averaged,
            complete=self.reader.has_read_all,
            ranks=self.options.world_size,
            same_on_all_ranks=not self.parameters.is_sharded,
            process_group=self.reader.process_group,
            shards=self.options.shards,
        )

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

    def _with_loss_scale(self, statistics: ReducedStatistics) -> tuple[ReducedStatistics, float]:
        """Return the statistics of the averaged gradients, and their loss scale; NaN if that is unclear."""
        averaged, before_step = statistics.averaged, statistics.before_step
        given = self._scale_of_scaler or 1.0
        if before_step is None or _are_equal(before_step, statistics.own):
            if self._scale_of_scaler is None:
                self._inferred_scale = 1.0  # nothing was unscaled
            return statistics, given
        if self._scale_of_scaler is None and not self.parameters.is_sharded:
            # Where ranks disagree, the program averages gradients itself after backward. The gradients before
            # the step are the mean then, and give no information about the loss scale.
            norms = averaged if statistics.agreed else before_step
            given = infer_loss_scale(sum(norms), sum(before_step), self._inferred_scale)
            if math.isnan(given):
                change = math.sqrt(sum(before_step) / sum(norms))
                warn_once(
                    self._warned,
                    "loss scale",
                    f"gradients were multiplied by {change:.3g} between backward() and step(), probably by a "
                    "GradScaler and by clipping. The loss scale cannot be determined from the two together, "
                    "so such steps are left out of the estimates: pass AdaScale(..., grad_scaler=scaler), or "
                    "without a scaler, grad_scaler=torch.amp.GradScaler(enabled=False)",
                )
            else:
                self._inferred_scale = given
        averaged = averaged if statistics.agreed else before_step
        return replace(statistics, averaged=averaged, agreed=True), given

    # -- estimates --------------------------------------------------------------------------------------

    def _averages_with(self, statistics: ReducedStatistics, loss_scale: float) -> list[MovingAverage]:
        """Return the averages with the estimates of this step, as far as it has any."""
        averages = self._averages
        if not (statistics.complete and statistics.agreed and statistics.finite and self._is_measurable()):
            return averages
        options, groups = self.options, len(self.parameters.groups())
        # The estimate of a measured step stands for all the steps of an interval.
        smoothing = options.smoothing
        if options.interval:
            # The training loop chooses few steps: their window is a quarter of the steps so far, if that is
            # longer.
            smoothing = max(smoothing, 1.0 - 4.0 / max(self._steps - self._sampling_start, 4))
        weight = smoothing ** (options.interval or self._interval())
        averages = [*averages, *[MovingAverage()] * (groups - len(averages))]
        defined, trainable = self._metric.defined_groups(), self.parameters.trainable()
        for group in range(groups):
            if trainable[group] and (defined is None or group in defined):
                estimate = self._estimate(group, statistics, loss_scale)
                if all(map(math.isfinite, estimate)):
                    averages[group] = averages[group].updated(
                        *estimate, weight, biased=options.micro_gradients == 1, debias=options.debias
                    )
        return averages

    def _is_measurable(self) -> bool:
        """Whether this step has the gradients that its estimates need."""
        if self.options.micro_gradients > 1:
            enough = self._weights is None or self._weights.positive >= 2
            return self.reader.micro_gradients >= 2 and self._has_expected_passes() and enough
        is_empty = self._weights is not None and self._weights.positive == 0
        if is_empty or not self._has_expected_passes():
            # What was read is the gradient of the first passes only, or of no valid samples.
            self._previous_gradient.invalidate()
            return False
        return self._previous_step is not None

    def _has_expected_passes(self) -> bool:
        passes = self.reader.passes
        if passes in (0, self.options.accumulation):
            return True
        warn_once(
            self._warned,
            "passes",
            f"got {passes} backward passes in a step, where {self.options.accumulation} are expected: such "
            "steps are left out of the estimates, so the gain is not measured. Add up the losses of a batch, "
            "and call backward() once. Only a loop without ElasticTrainer accumulates gradients itself, and "
            "calls AdaScale.set_num_gradients_to_accumulate() and AdaScale.set_scale() with its numbers",
        )
        return False

    def _estimate(self, group: int, statistics: ReducedStatistics, loss_scale: float) -> tuple[float, float]:
        """Return `grad_sqr` and `grad_var` of a group from this step."""
        summed, averaged, options = statistics.summed[group], statistics.averaged[group], self.options
        if options.micro_gradients == 1:
            previous = self._previous_step
            assert previous is not None
            product = summed / (loss_scale * previous.loss_scale)
            sqr_norms = averaged / loss_scale**2 + previous.sqr_norms[group] / previous.loss_scale**2
            sqr_of_difference = max(sqr_norms - 2.0 * product, 0.0)
            return from_consecutive_gradients(product, sqr_of_difference, previous.scale, options.scale)
        passes, count = options.accumulation, self.reader.micro_gradients
        count_of_rank = count // options.world_size
        mean_of_sqr, sqr_of_mean = summed / count, averaged
        if options.is_scaled_loss:
            mean_of_sqr = mean_of_sqr * count_of_rank**2
        elif self._weights is not None:
            # The mean of the squares is weighted too.
            mean_of_sqr = summed / (options.world_size * self.divisor)
            sqr_of_mean = averaged / self.divisor**2
            count = self._weights.positive
        else:
            mean_of_sqr = mean_of_sqr / (passes / count_of_rank) ** 2
            sqr_of_mean = averaged / passes**2
        unit = loss_scale**2
        return from_micro_gradients(count, mean_of_sqr / unit, sqr_of_mean / unit, options.scale)

    def _limited(self, estimate: GradientEstimate | None) -> GradientEstimate | None:
        limit = self.options.max_gain
        return estimate if estimate is None or limit is None else estimate.limited(limit)

    def _current_averages(self) -> list[MovingAverage]:
        """The averages with this step, as far as it is measured."""
        if self._all_reduce is None or self._is_left_out:
            return self._averages
        known = self._inferred_scale if self._scale_of_scaler is None else self._scale_of_scaler or 1.0
        return self._averages_with(self._all_reduce.result(), known)


def _are_equal(left: list[float], right: list[float]) -> bool:
    """Whether squared norms that are not all zero are the same, except for rounding."""
    pairs = zip(left, right, strict=True)
    return sum(left) > 0.0 and all(math.isclose(a, b, rel_tol=UNCHANGED) for a, b in pairs)
