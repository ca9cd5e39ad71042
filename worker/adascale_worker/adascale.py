"""AdaScale: an SGD whose learning rate grows with the batch as much as the batch is worth.

The algorithm is AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105). The interface is that of FairScale's
`AdaScale`, so that changing the import is all that a user of it needs; `docs/adascale.md` has the
differences. The formulas are in `adascale_core.gain`, the reading of gradients in
`adascale_worker.statistics`.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from adascale_core.errors import AdaScaleError
from adascale_core.gain import (
    GradientEstimate,
    default_smoothing,
    require_scale,
    require_smoothing,
    total,
)
from adascale_worker.statistics.estimates import Estimates, Samples
from adascale_worker.statistics.gradient_statistics import HOST, GradientStatistics, Setup
from adascale_worker.statistics.loss_scale import GradScaler
from adascale_worker.statistics.sampling import Sampling

STATE_KEY = "adascale"
"""Where AdaScale's own part lies in its state_dict, beside the inner optimizer's."""

STATE_VERSION = 1


class UnsupportedOptimizerError(AdaScaleError, TypeError):
    """The optimizer is none whose learning rate AdaScale may scale."""

    exit_code = 2


@dataclass
class _Run:
    """What changes while an optimizer is used.

    An object of its own: Lightning's optimizer takes on AdaScale's class and reads its attributes, but those
    that a method sets would be its own. So methods set nothing but what is in here.
    """

    world_size: int
    accumulation: int
    scale: float
    smoothing: float | None
    """As chosen; None follows the scale."""
    estimates: Estimates = field(default_factory=lambda: Estimates.nothing(0, HOST))
    steps: int = 0
    sampled_since: int = 0
    """The step from which sampling is counted."""
    flags_sum: Tensor | tuple[float, ...] | None = None
    divided: bool = False
    """Whether gradients were divided by the accumulation count since backward."""
    unhooked: bool = False


class AdaScale(torch.optim.Optimizer, Joinable):
    """Scales the learning rate of an SGD by the gain of its batch size.

    A step at scale S (a batch of S times the initial one) makes as much progress as `gain()` steps of the
    initial batch size, 1 <= gain <= S. `step()` multiplies each group's lr by the group's gain, and puts it
    back. Schedules stay as they were for the initial batch size; advance them, and count progress, by
    `gain()` per step instead of by 1.

    The estimates come from the n = world_size * num_gradients_to_accumulate gradients that a step is the
    mean of. With n = 1 they come from the difference of consecutive gradients, which is biased (see
    `adascale_worker.statistics.estimates.from_consecutive_gradients`); `estimate.biased` says so.

    Args:
        optimizer: a `torch.optim.SGD`, with or without momentum, or a wrapper of one like
            `ZeroRedundancyOptimizer`. Its parameter groups and state are shared with it.
        world_size: replicas; the size of the process group by default, 1 where there is none.
        scale: S, positive; `world_size * num_gradients_to_accumulate` by default.
        smoothing: share of the past in the moving average, at least 0 and below 1; max(1 - S/1000, 0) by
            default, and then it follows the scale.
        num_gradients_to_accumulate: backward passes per step.
        is_scaled_loss: whether the training loop divides the loss by `num_gradients_to_accumulate`. If
            not, `step()` divides the gradients.
        debias_ewma: whether the moving average is debiased; False is the paper's appendix B.3.
        model: the `DistributedDataParallel` around the model. Not needed, but with it local gradients are
            read all at once, and its process group is used. For a model with `fully_shard` (FSDP2) it is
            needed.
        sample_every: measure every k-th step. By default all of the first 100, then every 16th at most,
            depending on the smoothing; 1 measures every step.
        grad_scaler: the loop's `torch.amp.GradScaler`. Needed only where gradients are clipped between
            `unscale_()` and `step()`; elsewhere the loss scale is seen from the gradients.

    Raises:
        UnsupportedOptimizerError: `optimizer` is not an SGD, or has DTensors as parameters that `fully_shard`
            on `model` did not make, or others beside them. (It is a TypeError.)
        ValueError: a number out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
        *,
        model: torch.nn.Module | None = None,
        sample_every: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        _require_sgd(optimizer)
        self._sgd = optimizer
        super().__init__(
            cast(Any, [dict(group) for group in optimizer.param_groups]), dict(optimizer.defaults)
        )
        Joinable.__init__(self)
        process_group = model.process_group if isinstance(model, DistributedDataParallel) else None
        replicas = _world_size(process_group) if world_size is None else world_size
        _require_count("world_size", replicas)
        _require_count("num_gradients_to_accumulate", num_gradients_to_accumulate)
        scale = float(replicas * num_gradients_to_accumulate if scale is None else scale)
        require_scale(scale)
        if smoothing is not None:
            require_smoothing(smoothing)
        self._is_scaled_loss = is_scaled_loss
        self._debias_ewma = debias_ewma
        self._sampling = Sampling(sample_every)
        self._run = _Run(replicas, num_gradients_to_accumulate, scale, smoothing)
        gauge = GradientStatistics(optimizer, self._setup(), model, grad_scaler)
        _require_measurable(gauge.unmeasurable())
        self._attach(gauge)

    # -- what is known ----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that makes the steps."""
        return self._sgd

    @property
    def scale(self) -> float:
        """S: the batch size of a step over the initial one."""
        return self._run.scale

    @property
    def smoothing(self) -> float:
        """Share of the past in the moving average of the estimates."""
        chosen = self._run.smoothing
        return default_smoothing(self._run.scale) if chosen is None else chosen

    @property
    def estimate(self) -> GradientEstimate | None:
        """What is known of the gradients of all groups together; None while nothing is."""
        known = [estimate for estimate in self._told() if estimate is not None]
        return total(known) if known else None

    @property
    def grad_sqr(self) -> float:
        """Estimated squared norm of the true gradient, all groups; 0 while nothing is known."""
        estimate = self.estimate
        return 0.0 if estimate is None else estimate.grad_sqr

    @property
    def grad_var(self) -> float:
        """Estimated total variance of a gradient at the initial batch size; 0 while nothing is known."""
        estimate = self.estimate
        return 0.0 if estimate is None else estimate.grad_var

    def gain(self, pg_idx: int | None = None) -> float:
        """Return how many steps at the initial batch size this step is worth.

        From the end of the last backward pass on, this step's own gradients are in it.

        Args:
            pg_idx: a parameter group; by default, all of them together, the gain to count progress by.

        Raises:
            IndexError: there is no such group.
        """
        return self._gain(self._run.scale, pg_idx)

    def predict_gain(self, scale: float) -> float:
        """Return what the gain would be at another scale.

        Raises:
            ValueError: `scale` is not a positive finite number.
        """
        require_scale(scale)
        return self._gain(scale, None)

    def gain_tensor(self) -> Tensor:
        """Return `gain()` as a tensor of no dimension, where the learning rates are.

        On a GPU with tensors for learning rates, progress can so be counted without a word to the host.
        """
        return self._current().gain(self._run.scale)

    @property
    def flags(self) -> Sequence[float]:
        """Local numbers to be summed over ranks in the same all-reduce; as many on all ranks.

        Read when the last backward pass of a measured step ends, so what is set before `step()` travels with
        the next one.
        """
        return self._gauge.flags

    @flags.setter
    def flags(self, flags: Sequence[float]) -> None:
        self._gauge.flags = flags

    @property
    def flags_sum(self) -> tuple[float, ...] | None:
        """Sums over ranks of `flags`, as they were when the last step's all-reduce began.

        The same on all ranks on the same step. None if the last step had no all-reduce, or no flags in it.
        With one replica, the local flags.
        """
        if isinstance(self._run.flags_sum, Tensor):
            flags, estimates = self._run.flags_sum, self._run.estimates
            if self._gauge.hands_off:
                # Together with the estimates, which are asked for next: one wait for the device, not two.
                numbers = torch.cat([flags, estimates.packed()]).tolist()
                estimates.tell(numbers[flags.numel() :])
            else:  # the step has read those
                numbers = flags.tolist()
            self._run.flags_sum = tuple(numbers[: flags.numel()])
        return self._run.flags_sum

    # -- settings ---------------------------------------------------------------------------------------

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:  # noqa: ARG002
        """Tell the batch size, as a multiple of the initial one.

        Args:
            scale: S.
            update_estimate: without effect. The estimates do not depend on S, so there is nothing to
                update. (FairScale divides its variance by the change, and the gain has to settle anew.)

        Raises:
            ValueError: `scale` is not a positive finite number.
        """
        require_scale(scale)
        self._run.scale = float(scale)
        self._prepare_step()

    def update_scale(self, scale: float, replicas: int) -> None:
        """Tell the batch size, as a multiple of the initial one, and the number of replicas.

        Raises:
            ValueError: a number out of range.
        """
        _require_count("replicas", replicas)
        require_scale(scale)
        self._run.scale = float(scale)
        self._run.world_size = replicas
        self._prepare_step()

    def set_num_gradients_to_accumulate(
        self,
        num_gradients_to_accumulate: int,
        update_smoothing: bool = True,
    ) -> None:
        """Tell how many backward passes make a step. The scale must be told apart, by `set_scale`.

        Args:
            num_gradients_to_accumulate: at least 1.
            update_smoothing: let the smoothing follow the scale again, if it was chosen.

        Raises:
            ValueError: a number out of range.
        """
        _require_count("num_gradients_to_accumulate", num_gradients_to_accumulate)
        self._run.accumulation = num_gradients_to_accumulate
        if update_smoothing:
            self._run.smoothing = None
        self._prepare_step()

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide the gradients of an unscaled loss by the number of accumulated ones, now.

        `step()` does so by itself; this is for a loop that wants to clip them first.

        Raises:
            RuntimeError: the loss is scaled already.
        """
        if self._is_scaled_loss:
            raise RuntimeError(
                "the loss is said to be divided already (is_scaled_loss=True): dividing the gradients again "
                "would be wrong; either construct AdaScale with is_scaled_loss=False or leave this call out"
            )
        self._divide_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as `torch.optim.Optimizer.add_param_group`. Its gain is 1 until measured."""
        if not hasattr(self, "_gauge"):  # called by Optimizer.__init__, to check the groups that there are
            super().add_param_group(param_group)
            return
        self._sgd.add_param_group(param_group)
        self._share()
        self._run.sampled_since = self._run.steps
        self._prepare_step()

    def unhook(self) -> None:
        """Take all hooks off the parameters. The gain stays what it is from then on."""
        self._gauge.stop()
        self._run.unhooked = True

    # -- a step -----------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step with each group's lr multiplied by the group's gain.

        Args:
            closure: computes loss and gradients anew; called once, as SGD does.

        Returns:
            what `closure` returned, or what the inner optimizer's step did.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_in()
        if not self._is_scaled_loss and not self._run.divided:
            self._divide_gradients()
        with self._scaled_lr():
            returned = self._inner_step()
        if not self._gauge.left_out_of_join():
            self._run.steps += 1
        self._prepare_step()
        return loss if closure is not None else returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as `torch.optim.Optimizer.zero_grad`."""
        self._sgd.zero_grad(set_to_none)
        self._run.divided = False
        self._gauge.abandon()

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with AdaScale's own under the key "adascale".

        Tensors, numbers, strings, lists and dicts only. What describes the run and not the model (scale,
        replicas, accumulation, smoothing) is not in it: that is the constructor's.
        """
        self._gauge.warn()
        state = dict(self._sgd.state_dict())
        state[STATE_KEY] = {
            "version": STATE_VERSION,
            "steps": self._run.steps,
            "sampled_since": self._run.sampled_since,
            "groups": self._run.estimates.state_dict(),
            "gauge": self._gauge.state_dict(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, at whatever scale, replicas and accumulation.

        A plain SGD's state is taken as well, with a warning: estimates then begin anew.

        Raises:
            ValueError: the state is of a newer version, or does not fit the parameters.
        """
        inner = dict(state_dict)
        own = inner.pop(STATE_KEY, None)
        if own is not None and own["version"] > STATE_VERSION:
            raise ValueError(
                f"got AdaScale state of version {own['version']}; this program knows up to {STATE_VERSION}: "
                "load it with the newer version that saved it"
            )
        self._sgd.load_state_dict(inner)
        self._share()
        if own is None:
            warnings.warn(
                "the loaded state has no AdaScale part: it was saved by another optimizer. Its estimates "
                "begin anew, with a gain of 1",
                UserWarning,
                stacklevel=2,
            )
            gauge = {"loss_scale": 1.0, "previous": None}
            own = {"steps": 0, "sampled_since": 0, "groups": [], "gauge": gauge}
        self._run.steps = own["steps"]
        self._run.sampled_since = own["sampled_since"]
        self._run.estimates = Estimates.from_state_dict(own["groups"], HOST)
        self._gauge.load_state_dict(own["gauge"])
        self._prepare_step()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is tied to this process: hooks, the model, a GradScaler, a replaced `step`."""
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_gauge", "_inner_step", "step") and not name.startswith("_optimizer_")
        }
        state["_run"] = replace(self._run)
        state["gauge"] = self._gauge.state_dict()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "gauge" not in state:  # `Optimizer.__init__` and others use it in their own way
            super().__setstate__(state)
            return
        gauge = state.pop("gauge")
        super().__setstate__(state)
        self._attach(GradientStatistics(self._sgd, self._setup()))
        self._gauge.load_state_dict(gauge)
        self._prepare_step()

    # -- inside -----------------------------------------------------------------------------------------

    def _attach(self, gauge: GradientStatistics) -> None:
        """Connect to the inner optimizer, whose `step` may be replaced later by one that calls ours."""
        self._inner_step: Callable[[], float | None] = self._sgd.step
        self._gauge = gauge
        self._gauge.joinable = weakref.proxy(self)
        self._run.unhooked = False
        weakref.finalize(self, gauge.stop)
        self._share()
        itself = weakref.ref(self)
        self._sgd.register_load_state_dict_post_hook(
            lambda _: None if (one := itself()) is None else one._share()
        )
        self._prepare_step()

    def _share(self) -> None:
        """Have the inner optimizer's groups and state, which it replaces when it loads."""
        self.param_groups = self._sgd.param_groups
        self.state = self._sgd.state

    def _setup(self) -> Setup:
        return Setup(self._run.world_size, self._run.accumulation, self._run.scale, self._is_scaled_loss)

    def _prepare_step(self) -> None:
        self._run.divided = False
        setup, step = self._setup(), self._run.steps - self._run.sampled_since
        measures = self._sampling.measures if setup.micro_gradients > 1 else self._sampling.measures_pair
        measuring = measures(step, self.smoothing) and not self._run.unhooked
        self._gauge.prepare(setup, self._run.steps, measuring=measuring)

    def _take_in(self) -> None:
        """Average what this step's passes have measured into the estimates, and take in the sums of flags."""
        outcome = self._gauge.take(divided=self._run.divided)
        self._run.estimates = self._run.estimates.to(self._gauge.home)
        if outcome.samples is not None:
            self._run.estimates = self._updated(outcome.samples)
        self._run.flags_sum = tuple(self.flags) if self._run.world_size == 1 else outcome.flags

    def _updated(self, samples: Samples) -> Estimates:
        # A sample stands for all the steps from one to the next.
        distance = self._sampling.distance(self._run.steps - self._run.sampled_since, self.smoothing)
        known = self._run.estimates.to(samples.grad_sqr.device).with_groups(len(self.param_groups))
        return known.updated(samples, self.smoothing**distance, debias=self._debias_ewma)

    def _current(self) -> Estimates:
        """What is known of each group, with what the coming step has measured so far."""
        samples = self._gauge.peek()
        return self._run.estimates if samples is None else self._updated(samples)

    def _told(self) -> Sequence[GradientEstimate | None]:
        """What is known of each group, as numbers."""
        if self._gauge.home == HOST:
            self._gauge.warn()
        return self._current().told()

    def _gain(self, scale: float, group: int | None) -> float:
        if group is None:
            estimate = self.estimate
        else:
            if not -len(self.param_groups) <= group < len(self.param_groups):
                raise IndexError(f"got pg_idx={group}; there are {len(self.param_groups)} parameter groups")
            known = self._told()
            number = group % len(self.param_groups)
            estimate = known[number] if number < len(known) else None
        return 1.0 if estimate is None else estimate.gain(scale)

    def _divide_gradients(self) -> None:
        if self._run.accumulation > 1 and not self._run.divided:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_div_(gradients, float(self._run.accumulation))
            self._run.divided = True

    @contextmanager
    def _scaled_lr(self) -> Iterator[None]:
        originals = [group["lr"] for group in self.param_groups]
        try:
            for group, gain in zip(self.param_groups, self._gains(), strict=False):
                group["lr"] = _scaled(group["lr"], gain)
            yield
        finally:
            for group, lr in zip(self.param_groups, originals, strict=True):
                group["lr"] = lr

    def _gains(self) -> Sequence[float | Tensor]:
        """The gain of each group, as far as there are any: tensors where learning rates are."""
        if self._gauge.hands_off:
            return self._run.estimates.gains(self._run.scale).unbind()
        return [1.0 if one is None else one.gain(self._run.scale) for one in self._told()]

    # -- uneven inputs: torch.distributed.algorithms.join ------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002
        """Return what a rank without data does in each step of its peers, in `Join([model, optimizer])`."""
        return _Shadow(self._shadow_step)

    @property
    def join_device(self) -> torch.device:
        """Where the all-reduce of statistics is."""
        parameter: Tensor = self.param_groups[0]["params"][0]
        return parameter.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that the statistics are of."""
        group = self._gauge.process_group
        return dist.group.WORLD if group is None else group

    def _shadow_step(self) -> None:
        self._gauge.shadow()
        self._run.steps += 1
        self._prepare_step()


class _Shadow(JoinHook):
    """What a rank that is out of data does for AdaScale."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step

    def main_hook(self) -> None:
        self._step()


def _require_sgd(optimizer: object) -> None:
    if isinstance(optimizer, AdaScale):
        raise UnsupportedOptimizerError("got an AdaScale optimizer; give AdaScale the SGD itself, once")
    inner = getattr(optimizer, "optim", None)
    if not (isinstance(optimizer, torch.optim.SGD) or isinstance(inner, torch.optim.SGD)):
        name = (
            type(optimizer).__name__
            if inner is None
            else f"{type(optimizer).__name__} of {type(inner).__name__}"
        )
        raise UnsupportedOptimizerError(
            f"got {name}; AdaScale scales the learning rate of torch.optim.SGD, with or without momentum, or "
            "of a wrapper over it such as ZeroRedundancyOptimizer. The steps of an optimizer that rescales "
            "gradients, such as Adam, do not grow with the learning rate as AdaScale needs it: use SGD, "
            "or this optimizer without AdaScale"
        )


def _scaled(lr: float | Tensor, gain: float | Tensor) -> float | Tensor:
    """The learning rate of a step; of the type that it has."""
    product = lr * gain
    return product.to(lr.dtype) if isinstance(lr, Tensor) and isinstance(product, Tensor) else product


def _require_measurable(parameters: Sequence[Tensor]) -> None:
    if not parameters:
        return
    shape = tuple(parameters[0].shape)
    placements = getattr(parameters[0], "placements", None)
    if placements is None:
        raise UnsupportedOptimizerError(
            f"got a parameter of shape {shape} that fully_shard did not shard, and {len(parameters)} in all, "
            "beside some that it did; AdaScale measures all of a model's gradients in one way: apply "
            "fully_shard to the root module too, and without ignored_params"
        )
    raise UnsupportedOptimizerError(
        f"got a DTensor with placements {tuple(placements)} as a parameter of shape {shape}, and "
        f"{len(parameters)} in all; AdaScale measures DTensors only where fully_shard alone made them, and "
        "knows the model: give it as AdaScale(..., model=model). Tensor parallelism is not supported: use "
        "replicas or fully_shard, or SGD without AdaScale"
    )


def _require_count(name: str, value: int) -> None:
    if value != int(value) or value < 1:
        raise ValueError(f"got {name}={value}; it must be an integer, at least 1")


def _world_size(process_group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
