"""Reads the gradients of one step on this rank: those that the caller passes, or by hooks of autograd.

Each parameter gets one hook, only for the steps that are measured. The hooks return nothing and keep no
gradient, so `.grad` is what it would be without them. They are on the incoming gradient, because those can be
removed without a trace. (For each parameter that ever had a hook on the accumulated gradient, autograd enters
Python: 0.3 ms for 400 parameters, even after all hooks are removed.)

A pass ends when autograd has run the last callback that was queued for it. Under DistributedDataParallel the
first hook of a pass queues one that runs before that of DDP. It queues a second one, which runs after that of
DDP, when gradients are averaged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import UnsupportedOptimizerError
from adascale_worker.scaling.statistics.metric import Metric
from adascale_worker.scaling.statistics.norms import local_shard, sum_of_squares
from adascale_worker.scaling.statistics.parameters import OptimizerParameters, require_dense
from adascale_worker.scaling.statistics.steps import GainOptions
from adascale_worker.torch_private.autograd import (
    accumulates_gradient,
    backward_pass_id,
    call_at_end_of_backward,
    current_autograd_node,
    is_last_hook,
    remove_tensor_hook,
)
from adascale_worker.torch_private.modules import communication_hooks


class GradientReader:
    """The squared norms of micro-gradients, which the caller passes, and of averaged gradients."""

    ddp: DistributedDataParallel | None = None

    def __init__(self, parameters: OptimizerParameters, options: GainOptions, metric: Metric) -> None:
        self._parameters = parameters
        self._options = options
        self._metric = metric

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that gradients are averaged over; None for the default process group."""
        return None if self.ddp is None else self.ddp.process_group

    def unreadable_parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients cannot be read as the gradients of the others are."""
        return [p for group in self._parameters.groups() for p in group if hasattr(p, "placements")]

    def require_readable(self) -> None:
        """Check that the gradients of all parameters can be read."""
        unreadable = self.unreadable_parameters()
        if not unreadable:
            return
        shape = tuple(unreadable[0].shape)
        placements = getattr(unreadable[0], "placements", None)
        if placements is None:
            raise UnsupportedOptimizerError(
                f"got {len(unreadable)} parameters that fully_shard did not shard (the first has shape "
                f"{shape}) beside parameters that it did shard; AdaScale reads all gradients of a model in "
                "one way: apply fully_shard to the root module too, without ignored_params"
            )
        raise UnsupportedOptimizerError(
            f"got {len(unreadable)} DTensors as parameters, the first of shape {shape} with placements "
            f"{tuple(placements)}; AdaScale reads a DTensor only if fully_shard alone made it, over all "
            "ranks, and the model is given: AdaScale(..., model=model). Tensor and expert parallelism are "
            "not supported: use replicas, fully_shard, or the optimizer without AdaScale"
        )

    def observe(self, options: GainOptions) -> None:
        """Observe the backward passes of the next step."""
        self._options = options

    def remove_hooks(self) -> None:
        """Remove the hooks from all parameters."""

    def mark_incomplete(self) -> None:
        """Leave the step out if its first gradients were not read."""

    @property
    def micro_gradients(self) -> int:
        """Number of micro-gradients that were read in this step, on all ranks; 0 if it is unknown."""
        return self._options.micro_gradients

    def problem(self) -> str | None:
        """Return why gradients cannot be read from this loop, and what to change; None if they can."""
        return None

    def averaged_sqr_norms(self) -> Tensor:
        """Return the squared norms of the averaged gradients: shape (groups,).

        With FSDP2, those of the shards of this rank, times the number of ranks, so that the mean over ranks
        is the squared norm of the whole gradient.
        """
        return self.current_sqr_norms()

    def current_sqr_norms(self) -> Tensor:
        """Return the squared norms of the gradients as they are now on this rank: shape (groups,)."""
        device = self._parameters.device
        groups = enumerate(self._parameters.with_gradients())
        return torch.stack([self._metric.sqr_norm(group, *own, device) for group, own in groups])

    # -- micro-gradients ----------------------------------------------------------------------------------

    def begin_step(self, *, measuring: bool) -> None:  # noqa: ARG002
        """Discard what was read in this step, and read the next passes if `measuring`."""
        self._earlier: Tensor | None = None
        self.discard_last()
        self._count = 0  # without the last one

    @property
    def passes(self) -> int:
        """Micro-gradients that were read."""
        return self._count + self._has_last

    @property
    def has_read_all(self) -> bool:
        """Whether all micro-gradients of this rank were read, if the step has several."""
        is_single = self._options.micro_gradients == 1
        return is_single or (self._has_last and self.passes == self._options.accumulation)

    def discard_last(self) -> None:
        """Discard the present micro-gradient."""
        self._present: dict[int, list[Tensor]] = {}
        self._has_last = False
        self._last_weight = 1.0

    def read(self, group: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Read a part of a micro-gradient: the gradients of parameters of a group, not averaged."""
        if self._parameters.is_sharded:
            measured = [self._parameters.measures(parameter) for parameter in parameters]
            parameters, gradients = list(compress(parameters, measured)), list(compress(gradients, measured))
        norm = self._metric.sqr_norm(group, parameters, gradients, self._parameters.device)
        self._present.setdefault(group, []).append(norm)

    def end(self, weight: float) -> None:
        """End a micro-gradient that does not complete the step, whose loss was multiplied by `weight`."""
        norms = self._sqr_norms(weight)
        self._earlier = norms if self._earlier is None else self._earlier + norms
        self.discard_last()
        self._count += 1

    def end_last(self, weight: float) -> None:
        """End the micro-gradient that completes the step."""
        self._has_last, self._last_weight = True, weight

    def sum_of_sqr_norms(self) -> Tensor:
        """Return the sum of the squared norms, each divided by its weight: shape (groups,)."""
        last = self._sqr_norms(self._last_weight)
        return last if self._earlier is None else self._earlier + last

    def _sqr_norms(self, weight: float) -> Tensor:
        groups = len(self._parameters.groups())
        zero = torch.zeros((), **self._parameters.statistics_options)
        if weight <= 0.0:
            return zero.repeat(groups)
        sums = [sum(self._present.get(group, ()), zero) for group in range(groups)]
        return torch.stack(sums) / weight if weight != 1.0 else torch.stack(sums)


AVERAGING_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)
"""DDP communication hooks after which `.grad` is the mean of the ranks' gradients, up to rounding."""


class HookedGradients(GradientReader):
    """Norms of the local micro-gradients of a step, and the number of its backward passes."""

    def __init__(
        self,
        parameters: OptimizerParameters,
        options: GainOptions,
        metric: Metric,
        model: torch.nn.Module | None,
        on_pass_start: Callable[[], None],
        on_pass_end: Callable[[], None],
    ) -> None:
        super().__init__(parameters, options, metric)
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self._on_pass_start = on_pass_start
        self._on_pass_end = on_pass_end
        self._flat: list[Tensor] = []
        self._group_of: list[int] = []
        self._handles: dict[int, RemovableHandle] = {}
        self._reads_together = False

    def observe(self, options: GainOptions) -> None:
        """Observe the passes of the next step. Hooks that are already there stay.

        Gradients are read after the program's own hooks, which may change them. Ours is added again after one
        that the program has added later.
        """
        super().observe(options)
        ddp = self.ddp
        # Too late where `.grad` is a view of DDP's bucket, or DDP averages before our callback.
        self._reads_together = (
            ddp is not None
            and options.accumulation == 1
            and options.world_size > 1
            and not (ddp.gradient_as_bucket_view or ddp.static_graph)
        )
        groups = self._parameters.groups()
        flat = [parameter for group in groups for parameter in group]
        if len(flat) != len(self._flat) or any(a is not b for a, b in zip(flat, self._flat, strict=True)):
            self.remove_hooks()
            self._flat = flat
            self._group_of = [number for number, group in enumerate(groups) for _ in group]
        for index, handle in list(self._handles.items()):
            if not self._comes_last(index):
                handle.remove()
                del self._handles[index]
        for index, parameter in enumerate(self._flat):
            if index not in self._handles and parameter.requires_grad:
                self._handles[index] = self._add_hook(index, parameter)

    def remove_hooks(self) -> None:
        """Remove the hooks from all parameters."""
        for index, handle in self._handles.items():
            remove_tensor_hook(self._flat[index], handle)
        self._handles.clear()

    @property
    def passes(self) -> int:
        """Backward passes of this step so far."""
        return self._passes

    @property
    def has_read_all(self) -> bool:
        """Whether gradients were read in this step, each of them whole, if it has several.

        False if a parameter was unfrozen or got a hook in this step.
        """
        if self.problem() is not None:
            return False
        if self._options.micro_gradients == 1:
            return True
        return (
            bool(self._norms)
            and not self._has_lost
            and all(
                self._comes_last(index)
                if index in self._handles
                else parameter.grad is None or not parameter.requires_grad
                for index, parameter in enumerate(self._flat)
            )
        )

    def problem(self) -> str | None:
        """Return why gradients cannot be read from this loop, and what to change; None if they can."""
        if self._has_inner_pass:
            return (
                "got a re-entrant checkpoint, inside which parts of gradients are computed: use "
                "checkpoint(..., use_reentrant=False)"
            )
        hooks = communication_hooks(self.ddp) if self.ddp is not None else []
        if any(hook not in AVERAGING_HOOKS for hook in hooks):
            return (
                "got a communication hook of DistributedDataParallel, which may lose parts of gradients: use "
                "none, fp16_compress_hook or bf16_compress_hook"
            )
        return None

    def _comes_last(self, index: int) -> bool:
        """Whether gradients are read after all hooks of the program on a parameter."""
        return self._reads_together or is_last_hook(self._flat[index], self._handles[index])

    def begin_step(self, *, measuring: bool) -> None:
        """Discard the passes of this step so far."""
        super().begin_step(measuring=measuring)
        self._passes = 0
        # Of the current pass: the ids of it and of the passes inside it, and of calls of torch.autograd.grad.
        self._pass_ids: set[int] = set()
        self._ignored_ids: set[int] = set()
        self._norms: list[tuple[int, Tensor]] = []
        """Norms whose squares add up to those of the micro-gradients, each with its parameter group."""
        self._arrived: list[int] = []
        """What is read from `.grad` at the end of the pass, which takes less time than one by one."""
        self._has_inner_pass = self._has_lost = False

    def sum_of_sqr_norms(self) -> Tensor:
        """Return the sum of the squared norms of the local micro-gradients: shape (groups,)."""
        found: list[list[Tensor]] = [[] for _ in self._parameters.groups()]
        for group, norm in self._norms:
            found[group].append(norm)
        return torch.stack([sum_of_squares(norms, self._parameters.device) for norms in found])

    # -- hooks ------------------------------------------------------------------------------------------

    def _add_hook(self, index: int, parameter: Tensor) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_hook(partial(self._read_arrived, index))
        return handle

    def _read_arrived(self, index: int, gradient: Tensor) -> None:
        """Read a micro-gradient before it is added to `.grad`."""
        if backward_pass_id() not in self._pass_ids and not self._enter_pass(index):
            return
        if self._reads_together:
            self._arrived.append(index)
        elif self._options.micro_gradients > 1:
            group = self._group_of[index]
            norm = self._metric.norm(group, self._flat[index], require_dense(gradient).detach())
            self._norms.append((group, norm))

    def _enter_pass(self, index: int) -> bool:
        """Begin a pass, or a pass inside it. False in `torch.autograd.grad`, which does not change .grad."""
        if backward_pass_id() in self._ignored_ids:
            return False
        if not accumulates_gradient(self._flat[index]):
            self._ignored_ids.add(backward_pass_id())
            return False
        self._begin_pass()
        return True

    def _begin_pass(self) -> None:
        if not self._pass_ids:
            self._on_pass_start()
        self._pass_ids.add(backward_pass_id())
        call_at_end_of_backward(self._before_averaging)

    def _before_averaging(self) -> None:
        arrived, self._arrived = sorted(set(self._arrived)), []
        for group, indices in groupby(arrived, key=self._group_of.__getitem__):
            own = [self._flat[index] for index in indices]
            gradients = [local_shard(require_dense(grad)) for p in own if (grad := p.grad) is not None]
            if len(gradients) < len(own):  # An optimizer in the backward pass has used them.
                self._has_lost = True
                continue
            sqr_norm = self._metric.sqr_norm(group, own, gradients, self._parameters.device)
            self._norms.append((group, sqr_norm.sqrt()))
        call_at_end_of_backward(self._after_averaging)

    def _after_averaging(self) -> None:
        # Re-entrant checkpointing runs whole passes inside an outer one. Their callbacks run while a node of
        # the outer pass is evaluated.
        if current_autograd_node() is not None:
            self._has_inner_pass = True
            return
        self._pass_ids.clear()
        self._passes += 1
        self._on_pass_end()
