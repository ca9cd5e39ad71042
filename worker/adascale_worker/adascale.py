"""AdaScale: an SGD whose learning rate grows with the batch as much as the batch is worth.

The algorithm is AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105). The interface is that of FairScale's
`AdaScale`, so that changing the import is all that a user of it needs; `docs/adascale.md` has the
differences. The formulas are in `adascale_core.gain`, the reading of gradients in
`adascale_worker.statistics`.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from adascale_core.errors import AdaScaleError
from adascale_core.gain import (
    GradientEstimate,
    MovingAverage,
    RunningEstimate,
    default_smoothing,
    from_consecutive_gradients,
    from_micro_gradients,
    require_scale,
    require_smoothing,
    total,
)
from adascale_worker.statistics.backward import BackwardWatch, Reading
from adascale_worker.statistics.exchange import Exchange, Statistics, sqr_norms_of_mean
from adascale_worker.statistics.fingerprint import Fingerprint
from adascale_worker.statistics.loss_scale import GradScaler, LossScale
from adascale_worker.statistics.norms import local, sqr_norms, widest_type
from adascale_worker.statistics.previous import Label, PreviousGradient
from adascale_worker.statistics.sampling import Sampling

if TYPE_CHECKING:
    from adascale_worker.statistics.sharded import ShardedGradients

STATE_KEY = "adascale"
"""Where AdaScale's own part lies in its state_dict, beside the inner optimizer's."""

STATE_VERSION = 1

AVERAGING_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
"""DDP communication hooks after which `.grad` is the mean of the ranks' gradients, up to rounding."""


class UnsupportedOptimizerError(AdaScaleError, TypeError):
    """The optimizer is none whose learning rate AdaScale may scale."""

    exit_code = 2


class AdaScale(torch.optim.Optimizer, Joinable):
    """Scales the learning rate of an SGD by the gain of its batch size.

    A step at scale S (a batch of S times the initial one) makes as much progress as `gain()` steps of the
    initial batch size, 1 <= gain <= S. `step()` multiplies each group's lr by the group's gain, and puts it
    back. Schedules stay as they were for the initial batch size; advance them, and count progress, by
    `gain()` per step instead of by 1.

    The estimates come from the n = world_size * num_gradients_to_accumulate gradients that a step is the
    mean of. With n = 1 they come from the difference of consecutive gradients, which is biased (see
    `adascale_core.gain.from_consecutive_gradients`); `estimate.biased` says so.

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
        UnsupportedOptimizerError: `optimizer` is not an SGD. (It is a TypeError.)
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
        self._optimizer: torch.optim.Optimizer | None = None
        super().__init__(
            cast(Any, [dict(group) for group in optimizer.param_groups]), dict(optimizer.defaults)
        )
        Joinable.__init__(self)
        self._optimizer = optimizer
        self._model = model if isinstance(model, DistributedDataParallel) else None
        self._process_group = None if self._model is None else self._model.process_group
        self._world_size = _world_size(self._process_group) if world_size is None else world_size
        self._accumulation = num_gradients_to_accumulate
        _require_count("world_size", self._world_size)
        _require_count("num_gradients_to_accumulate", num_gradients_to_accumulate)
        self._scale = float(self._world_size * num_gradients_to_accumulate if scale is None else scale)
        require_scale(self._scale)
        if smoothing is not None:
            require_smoothing(smoothing)
        self._chosen_smoothing = smoothing
        self._is_scaled_loss = is_scaled_loss
        self._debias_ewma = debias_ewma
        self._sampling = Sampling(sample_every)
        self._loss_scale = LossScale(grad_scaler)
        self._previous = PreviousGradient()
        self._estimates: list[RunningEstimate] = []
        self._steps = 0
        self._sampled_since = 0
        self.flags: Sequence[float] = ()
        self._flags_sum: tuple[float, ...] | None = None
        self._sharded = _sharded_gradients(model, self._parameters(), self._world_size)
        self._attach()
        self._prepare_step()

    # -- what is known ----------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that makes the steps."""
        if self._optimizer is None:
            raise RuntimeError("AdaScale is not built yet")
        return self._optimizer

    @property
    def scale(self) -> float:
        """S: the batch size of a step over the initial one."""
        return self._scale

    @property
    def smoothing(self) -> float:
        """Share of the past in the moving average of the estimates."""
        return default_smoothing(self._scale) if self._chosen_smoothing is None else self._chosen_smoothing

    @property
    def estimate(self) -> GradientEstimate | None:
        """What is known of the gradients of all groups together; None while nothing is."""
        known = [estimate for running in self._current() if (estimate := running.estimate) is not None]
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
        return self._gain(self._scale, pg_idx)

    def predict_gain(self, scale: float) -> float:
        """Return what the gain would be at another scale.

        Raises:
            ValueError: `scale` is not a positive finite number.
        """
        require_scale(scale)
        return self._gain(scale, None)

    @property
    def flags_sum(self) -> tuple[float, ...] | None:
        """Sums over ranks of `flags`, as they were when the last step's all-reduce began.

        The same on all ranks on the same step. None if the last step had no all-reduce, or no flags in it.
        With one replica, the local flags.
        """
        return self._flags_sum

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
        self._scale = float(scale)
        self._prepare_step()

    def update_scale(self, scale: float, replicas: int) -> None:
        """Tell the batch size, as a multiple of the initial one, and the number of replicas.

        Raises:
            ValueError: a number out of range.
        """
        _require_count("replicas", replicas)
        require_scale(scale)
        self._scale = float(scale)
        self._world_size = replicas
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
        self._accumulation = num_gradients_to_accumulate
        if update_smoothing:
            self._chosen_smoothing = None
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
        if self._optimizer is None:  # called by Optimizer.__init__, to check the groups that there are
            super().add_param_group(param_group)
            return
        self._optimizer.add_param_group(param_group)
        self._share()
        self._sampled_since = self._steps
        self._prepare_step()

    def unhook(self) -> None:
        """Take all hooks off the parameters. The gain stays what it is from then on."""
        self._watch.stop()
        self._abandon()
        self._unhooked = True

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
        if not self._is_scaled_loss and not self._divided:
            self._divide_gradients()
        with self._scaled_lr():
            returned = self._inner_step()
        if not self._joined_without_us():
            self._steps += 1
        self._prepare_step()
        return loss if closure is not None else returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as `torch.optim.Optimizer.zero_grad`."""
        self.optimizer.zero_grad(set_to_none)
        self._abandon()

    # -- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with AdaScale's own under the key "adascale".

        Tensors, numbers, strings, lists and dicts only. What describes the run and not the model (scale,
        replicas, accumulation, smoothing) is not in it: that is the constructor's.
        """
        state = dict(self.optimizer.state_dict())
        state[STATE_KEY] = {
            "version": STATE_VERSION,
            "steps": self._steps,
            "sampled_since": self._sampled_since,
            "loss_scale": self._loss_scale.seen,
            "groups": [
                {
                    "unbiased": asdict(running.unbiased),
                    "biased": None if running.biased is None else asdict(running.biased),
                }
                for running in self._estimates
            ],
            "previous": self._previous.state_dict(),
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
        self.optimizer.load_state_dict(inner)
        self._share()
        self._abandon()
        if own is None:
            warnings.warn(
                "the loaded state has no AdaScale part: it was saved by another optimizer. Its estimates "
                "begin anew, with a gain of 1",
                UserWarning,
                stacklevel=2,
            )
            own = {"steps": 0, "sampled_since": 0, "loss_scale": 1.0, "groups": [], "previous": None}
        self._steps = own["steps"]
        self._sampled_since = own["sampled_since"]
        self._loss_scale.seen = own["loss_scale"]
        self._estimates = [
            RunningEstimate(
                MovingAverage(**group["unbiased"]),
                None if group["biased"] is None else MovingAverage(**group["biased"]),
            )
            for group in own["groups"]
        ]
        self._previous.load_state_dict(own["previous"], self._parameters())
        self._prepare_step()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_watch", "_inner_step", "_exchange", "_model", "_sharded", "_process_group", "step"):
            state.pop(name, None)
        for name in [name for name in state if name.startswith("_optimizer_")]:
            del state[name]
        state["_loss_scale_seen"] = state.pop("_loss_scale").seen
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        seen = state.pop("_loss_scale_seen", None)
        super().__setstate__(state)
        if seen is None:
            return
        self._model = None
        self._sharded = None
        self._process_group = None
        self._loss_scale = LossScale()
        self._loss_scale.seen = seen
        self._attach()
        self._prepare_step()

    # -- inside -----------------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Connect to the inner optimizer, whose `step` may be replaced later by one that calls ours."""
        self._inner_step: Callable[[], float | None] = self.optimizer.step
        self._exchange: Exchange | None = None
        self._pass_loss_scale: float | None = None
        self._before: Label | None = None
        self._divided = False
        self._unhooked = False
        self._warned_of_passes = False
        self._warned_of_join = False
        self._compressed = False
        itself = weakref.ref(self)
        self._watch: BackwardWatch = BackwardWatch(
            lambda: None if (one := itself()) is None else one._on_pass_start(),
            lambda: None if (one := itself()) is None else one._on_pass_end(),
        )
        weakref.finalize(self, self._watch.stop)
        self._share()
        self.optimizer.register_load_state_dict_post_hook(
            lambda _: None if (one := itself()) is None else one._share()
        )

    def _share(self) -> None:
        """Have the inner optimizer's groups and state, which it replaces when it loads."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        parameters = [parameter for group in self._parameters() for parameter in group]
        on_cpu = all(parameter.is_cpu for parameter in parameters)
        self._fingerprint = Fingerprint(p for p in parameters if p.requires_grad) if on_cpu else None

    @property
    def _micro_gradients(self) -> int:
        return self._world_size * self._accumulation

    def _parameters(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]

    def _trained(self) -> list[bool]:
        """Whether each group has a parameter that is not frozen."""
        return [any(parameter.requires_grad for parameter in group) for group in self._parameters()]

    def _device(self) -> torch.device:
        return self._parameters()[0][0].device

    def _gradients(self) -> list[list[Tensor]]:
        return [
            [local(parameter.grad) for parameter in group if parameter.grad is not None]
            for group in self._parameters()
        ]

    def _measures(self) -> bool:
        step = self._steps - self._sampled_since
        if self._micro_gradients == 1:
            return self._sampling.measures_pair(step, self.smoothing)
        return self._sampling.measures(step, self.smoothing)

    def _prepare_step(self) -> None:
        """Hook the parameters if the coming step is to be measured, unhook them if not."""
        self._measuring = self._measures() and not self._unhooked
        self._abandon()
        if self._micro_gradients > 1 or not self._measuring:
            self._previous.drop()
        if not self._measuring:
            self._watch.stop()
            return
        if self._sharded is not None or self._micro_gradients == 1:
            reading = Reading.NOT_AT_ALL
        elif self._accumulation > 1:
            reading = Reading.BEFORE_GRAD
        elif self._model is not None and not (
            self._model.gradient_as_bucket_view or self._model.static_graph
        ):
            reading = Reading.AFTER_PASS
        else:
            reading = Reading.IN_GRAD
        self._watch.watch(self._parameters(), reading)

    def _abandon(self) -> None:
        """Forget what this step's passes have measured."""
        if self._exchange is not None:
            self._exchange.finish()
            self._exchange = None
            self._previous.drop()
        self._divided = False
        self._watch.begin_step()
        if self._sharded is not None:
            self._sharded.begin_step()
            self._sharded.watching = self._measuring

    # -- uneven inputs: torch.distributed.algorithms.join ------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002
        """Return what a rank without data does in each step of its peers, in `Join([model, optimizer])`."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where the all-reduce of statistics is."""
        return self._device()

    @property
    def join_process_group(self) -> Any:
        """The ranks that the statistics are of."""
        return dist.group.WORLD if self._process_group is None else self._process_group

    def _shadow_step(self) -> None:
        """Match the all-reduce of peers that still have data. They leave the step out of the estimates."""
        if self._measuring and self._world_size > 1:
            device = self._device()
            nothing = torch.zeros(len(self.param_groups), dtype=widest_type(device), device=device)
            self._exchange = Exchange(
                nothing,
                nothing,
                self.flags,
                ranks=self._world_size,
                complete=False,
                process_group=self._process_group,
            )
        self._steps += 1
        self._prepare_step()

    def _joined_without_us(self) -> bool:
        """Whether the model takes part in a `Join` that AdaScale does not: peers may be without data."""
        if self._model is None or not self._model._join_config.enable or self._join_config.enable:
            return False
        if not self._warned_of_join:
            self._warned_of_join = True
            warnings.warn(
                "the model takes uneven inputs and AdaScale is not told: it measures nothing, for its "
                "all-reduce would wait for ranks without data. Use `with Join([model, optimizer]):` of "
                "torch.distributed.algorithms.join instead of `with model.join():`",
                RuntimeWarning,
                stacklevel=4,
            )
        return True

    # -- measuring --------------------------------------------------------------------------------------

    def _on_pass_start(self) -> None:
        self._watch.keep = self._compresses()
        # A GradScaler leaves out the step after gradients that are not finite: then a new one begins here.
        if self._exchange is not None and not _finite(self._exchange.statistics()):
            self._abandon()

    def _on_pass_end(self) -> None:
        if self._watch.passes == self._accumulation and not self._joined_without_us():
            self._measure()

    def _compresses(self) -> bool:
        """Whether gradients are averaged by a communication hook that may lose some of them."""
        hooks = () if self._model is None else getattr(self._model, "_comm_hooks", ())
        return any(hook not in AVERAGING_HOOKS for hook, _ in hooks)

    def _measure(self) -> None:
        """Read the averaged gradients, and start the all-reduce."""
        gradients, device = self._gradients(), self._device()
        averaged = sqr_norms(gradients, device)
        self._compressed = self._watch.keep and self._world_size > 1
        if self._compressed:
            averaged = sqr_norms_of_mean(
                self._watch.kept(), device, ranks=self._world_size, process_group=self._process_group
            )
        if self._sharded is not None and self._micro_gradients > 1:
            first = self._sharded.local_sqr(device)
            complete = self._sharded.complete(self._accumulation)
            averaged = averaged * self._sharded.shards  # so that the mean over ranks is the sum over shards
        elif self._micro_gradients > 1:
            first = self._watch.local_sqr(len(gradients), device)
            complete = self._watch.saw_any and self._watch.sees_all()
        else:
            first = self._compare(device)
            complete = True
        if self._fingerprint is not None:
            self._fingerprint.take()
        self._pass_loss_scale = self._loss_scale.ask()
        if self._exchange is not None:
            self._exchange.finish()
        self._exchange = Exchange(
            first,
            averaged,
            self.flags,
            ranks=self._world_size,
            complete=complete,
            replicated=self._sharded is None,
            process_group=self._process_group,
        )

    def _compare(self, device: torch.device) -> Tensor:
        """Return the inner product with the previous gradient, per group, and hold the current one."""
        parameters = self._parameters()
        products = torch.zeros(len(parameters), dtype=widest_type(device), device=device)
        self._before = None
        if self._previous.fits(self._steps, parameters):
            products = self._previous.inner_products(parameters, device)
            self._before = self._previous.label
        self._previous.hold(parameters, step=self._steps)
        return products

    def _take_in(self) -> None:
        """Average what this step's passes have measured into the estimates."""
        self._flags_sum = tuple(self.flags) if self._world_size == 1 else None
        if not self._measuring or self._joined_without_us():
            return
        if self._exchange is None:
            self._measure()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        now = self._gradients_now()
        statistics = exchange.statistics(now)
        if self._world_size > 1:
            self._flags_sum = statistics.flags or None
        statistics, loss_scale = self._as_of_backward(statistics)
        samples = self._samples(statistics, loss_scale)
        self._previous.label = None
        if _finite(statistics) and loss_scale is not None:
            self._previous.label = Label(statistics.second, self._scale, loss_scale)
        if samples is not None:
            self._estimates = self._updated(samples)

    def _gradients_now(self) -> Tensor | None:
        """Return the squared norms of what will be stepped with, (groups,); None if surely unchanged.

        Between backward and step gradients may have been unscaled, clipped, or averaged by hand. On the
        CPU a look at the smallest ones saves the reading of all; elsewhere the look would cost more.
        """
        if self._fingerprint is not None and self._fingerprint.matches():
            return None
        norms = sqr_norms(self._gradients(), self._device())
        return norms * self._accumulation**2 if self._divided else norms

    def _as_of_backward(self, statistics: Statistics) -> tuple[Statistics, float | None]:
        """Return the statistics of averaged gradients, and the loss scale that they are in units of."""
        now = statistics.now
        if not statistics.agreed and now is not None:
            # Averaged by hand after backward: what is stepped with is the mean.
            return replace(statistics, second=now, agreed=True), self._pass_loss_scale or 1.0
        if self._pass_loss_scale is not None or self._compressed or self._sharded is not None:
            return statistics, self._pass_loss_scale or 1.0
        after = statistics.second if now is None else now
        return statistics, self._loss_scale.infer(sum(statistics.second), sum(after))

    def _samples(
        self, statistics: Statistics, loss_scale: float | None
    ) -> list[GradientEstimate | None] | None:
        """Return what the step says of each group, None for a frozen group; None if unusable."""
        if loss_scale is None or not statistics.complete or not statistics.agreed or not _finite(statistics):
            return None
        if self._micro_gradients == 1:
            return self._difference_samples(statistics, loss_scale)
        if self._watch.passes not in (0, self._accumulation):
            self._warn_of_passes()
            return None
        count, unit = self._micro_gradients, loss_scale**2
        local_unit = unit / self._accumulation**2 if self._is_scaled_loss else unit
        mean_unit = unit if self._is_scaled_loss else unit * self._accumulation**2
        return [
            from_micro_gradients(count, local / local_unit / count, mean / mean_unit, self._scale)
            if trained
            else None
            for local, mean, trained in zip(statistics.first, statistics.second, self._trained(), strict=True)
        ]

    def _difference_samples(
        self, statistics: Statistics, loss_scale: float
    ) -> list[GradientEstimate | None] | None:
        if self._before is None:
            return None
        samples: list[GradientEstimate | None] = []
        before = self._before
        numbers = zip(statistics.first, statistics.second, before.sqr, self._trained(), strict=True)
        for product, now, then, trained in numbers:
            product /= loss_scale * before.loss_scale
            now, then = now / loss_scale**2, then / before.loss_scale**2
            difference = max(now + then - 2.0 * product, 0.0)
            samples.append(
                from_consecutive_gradients(product, difference, before.scale, self._scale)
                if trained
                else None
            )
        return samples

    def _warn_of_passes(self) -> None:
        if not self._warned_of_passes:
            self._warned_of_passes = True
            warnings.warn(
                f"got {self._watch.passes} backward passes in a step, num_gradients_to_accumulate is "
                f"{self._accumulation}: such steps are left out of the estimates. Add up losses before one "
                "backward(), or tell what the loop does: set_num_gradients_to_accumulate() and set_scale()",
                RuntimeWarning,
                stacklevel=5,
            )

    def _updated(self, samples: list[GradientEstimate | None]) -> list[RunningEstimate]:
        smoothing = self.smoothing ** self._sampling.distance(
            self._steps - self._sampled_since, self.smoothing
        )
        running = self._estimates + [RunningEstimate()] * (len(samples) - len(self._estimates))
        return [
            old if sample is None else old.updated(sample, smoothing, debias=self._debias_ewma)
            for old, sample in zip(running, samples, strict=True)
        ]

    def _current(self) -> list[RunningEstimate]:
        """What is known of each group, with what the coming step has measured so far."""
        if self._exchange is None:
            return self._estimates
        loss_scale = self._pass_loss_scale or self._loss_scale.seen
        samples = self._samples(self._exchange.statistics(), loss_scale)
        return self._estimates if samples is None else self._updated(samples)

    def _gain(self, scale: float, group: int | None) -> float:
        if group is None:
            estimate = self.estimate
        else:
            if not -len(self.param_groups) <= group < len(self.param_groups):
                raise IndexError(f"got pg_idx={group}; there are {len(self.param_groups)} parameter groups")
            known = self._current()
            number = group % len(self.param_groups)
            estimate = known[number].estimate if number < len(known) else None
        return 1.0 if estimate is None else estimate.gain(scale)

    def _divide_gradients(self) -> None:
        if self._accumulation > 1 and not self._divided:
            gradients = [gradient for group in self._gradients() for gradient in group]
            torch._foreach_div_(gradients, float(self._accumulation))
            self._divided = True

    @contextmanager
    def _scaled_lr(self) -> Iterator[None]:
        originals = [group["lr"] for group in self.param_groups]
        try:
            for group, running in zip(self.param_groups, self._estimates, strict=False):
                estimate = running.estimate
                if estimate is not None:
                    group["lr"] = group["lr"] * estimate.gain(self._scale)
            yield
        finally:
            for group, lr in zip(self.param_groups, originals, strict=True):
                group["lr"] = lr


class _Shadow(JoinHook):
    """What a rank that is out of data does for AdaScale."""

    def __init__(self, adascale: AdaScale) -> None:
        self._adascale = adascale

    def main_hook(self) -> None:
        self._adascale._shadow_step()


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


def _sharded_gradients(
    model: torch.nn.Module | None, parameters: list[list[Tensor]], ranks: int
) -> "ShardedGradients | None":
    if model is None or not hasattr(model, "set_custom_reduce_scatter"):
        return None
    from adascale_worker.statistics.sharded import ShardedGradients  # FSDP2 takes long to import

    return ShardedGradients(model, parameters, ranks)


def _require_count(name: str, value: int) -> None:
    if value != int(value) or value < 1:
        raise ValueError(f"got {name}={value}; it must be an integer, at least 1")


def _world_size(process_group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1


def _finite(statistics: Statistics) -> bool:
    return all(math.isfinite(value) for value in (*statistics.first, *statistics.second))
