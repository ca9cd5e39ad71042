"""Everything the worker uses of torch that torch does not document.

Each function names the private part that it uses and why the public interface is not enough. The tests of
the worker pass with these versions:

- torch 2.9.0, the lowest that `pyproject.toml` allows. Up to 2.7, a process can wait forever while it
  destroys a process group (github.com/pytorch/pytorch/pull/154976), thus at any change of the replicas. Up to
  2.8, gradients of `fully_shard` (FSDP2) cannot be read (`FSDPModule.set_custom_reduce_scatter`);
- torch 2.15.0, the version in `requirements.lock`.

A part that the installed torch does not have raises `UnsupportedTorchError`, with its name and the version.
FSDP2 and DTensor take a third of a second to import, so they are imported only where a model uses them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from adascale_worker.errors import WorkerError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

TESTED_VERSIONS = ("2.9.0", "2.15.0")


class UnsupportedTorchError(WorkerError, RuntimeError):
    """The installed torch does not have something that the worker needs."""


def _private(owner: Any, name: str, purpose: str) -> Any:
    """Return `owner.name`.

    Raises:
        UnsupportedTorchError: `owner` has no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no `{owner_name}.{name}`, which AdaScale needs {purpose}; "
            f"install a version that AdaScale is tested with: {', '.join(TESTED_VERSIONS)}"
        ) from None


# -- autograd ------------------------------------------------------------------------------------------------

backward_pass_id: Callable[[], int] = _private(
    torch._C, "_current_graph_task_id", "to count the backward passes of a step"
)
"""Return the number of the backward pass that runs on this thread; -1 outside of a backward pass.

A function of torch itself and not wrapped, because hooks call it for every gradient.
"""

call_at_end_of_backward: Callable[[Callable[[], None]], None] = _private(
    torch.autograd.Variable._execution_engine, "queue_callback", "to read gradients after a backward pass"
)
"""Call a function when the current backward pass ends, after the functions that were queued before it.

DistributedDataParallel queues its own in the same way, so the order of the two is defined. A hook on the last
gradient would not do: which gradient is the last is not known.
"""

current_autograd_node: Callable[[], Any] = _private(
    torch._C, "_current_autograd_node", "to distinguish a backward pass inside another from the outer pass"
)
"""Return the node of the graph that autograd evaluates now; None outside of a node.

At the end of a backward pass that a node of another pass started (re-entrant checkpointing), it is that node.
"""


def accumulates_gradient(parameter: Tensor) -> bool:
    """Whether the current backward pass adds to `parameter.grad`.

    It does not in `torch.autograd.grad`, which calls the same hooks. The function queries whether the engine
    evaluates the node that accumulates the gradient. That node is found behind a view of the parameter.
    """
    with torch.enable_grad():
        view_node = parameter.view_as(parameter).grad_fn
    accumulation_node = None if view_node is None else view_node.next_functions[0][0]
    will_execute = _private(torch._C, "_will_engine_execute_node", "to ignore torch.autograd.grad")
    try:
        return accumulation_node is not None and bool(will_execute(accumulation_node))
    except RuntimeError:  # the engine refuses to answer for a leaf in torch.autograd.grad
        return False


def hooks_after(tensor: Tensor, handle: RemovableHandle) -> list[Callable[..., Any]]:
    """Return the hooks on the gradient of `tensor` that are called after that of `handle`, last first."""
    later: list[Callable[..., Any]] = []
    hooks = _private(tensor, "_backward_hooks", "to find the hooks of the program") or {}
    for number, hook in reversed(hooks.items()):
        if number == handle.id:
            break
        later.append(hook)
    return later


def has_post_accumulate_hooks(parameter: Tensor) -> bool:
    """Whether `parameter.register_post_accumulate_grad_hook` was called, and the hook not removed."""
    hooks = _private(parameter, "_post_accumulate_grad_hooks", "to find hooks that change gradients")
    return bool(hooks)


def remove_tensor_hook(tensor: Tensor, handle: RemovableHandle) -> None:
    """Remove a hook on the gradient of `tensor`, and the empty collection that its removal leaves behind.

    Autograd enters Python for each tensor with a collection of hooks, even if the collection is empty.
    """
    handle.remove()
    if not _private(tensor, "_backward_hooks", "to remove its hooks without a trace"):
        tensor._backward_hooks = None


# -- arithmetic on many tensors ------------------------------------------------------------------------------


def l2_norms(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the L2 norm of each tensor, with one kernel for many of them.

    `torch.nn.utils.get_total_norm` uses the same kernel and returns only the norm of all.

    Args:
        tensors: of any shape.
        dtype: to compute in; that of the tensors if None.
    """
    if not tensors:
        return []
    norm = _private(torch, "_foreach_norm", "to read the norms of gradients")
    return list(norm(tensors, 2) if dtype is None else norm(tensors, 2, dtype=dtype))


def weighted_sqr_norms(tensors: Sequence[Tensor], divisors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of x^2 / divisor for each tensor x.

    Args:
        tensors: of one dimension, on one device.
        divisors: of the same shapes, and positive. May be overwritten.
    """
    if tensors[0].is_cpu:
        # An inner product costs a fraction of a norm there.
        return [torch.dot(_quotient(x, divisor), x) for x, divisor in zip(tensors, divisors, strict=True)]
    return weighted_sqr_norms_together(tensors, divisors)


def weighted_sqr_norms_together(tensors: Sequence[Tensor], divisors: Sequence[Tensor]) -> list[Tensor]:
    """As `weighted_sqr_norms`, with one kernel of each kind for many tensors on a GPU."""
    quotients = _private(torch, "_foreach_div", "to divide gradients")(tensors, divisors)
    _private(torch, "_foreach_mul_", "to divide gradients")(quotients, tensors)
    # They are not negative, so their sum is their L1 norm.
    return list(_private(torch, "_foreach_norm", "to read the norms of gradients")(quotients, 1))


def _quotient(tensor: Tensor, divisor: Tensor) -> Tensor:
    if tensor.dtype is divisor.dtype:
        return torch.div(tensor, divisor, out=divisor)
    return (tensor / divisor).to(tensor.dtype)


def multiply_in_place(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor by `factor`, with one kernel for many of them."""
    if tensors:
        _private(torch, "_foreach_mul_", "to convert the steps of an optimizer")(tensors, factor)


def let_clipping_find_no_gradients() -> Callable[[], None]:
    """Let `clip_grad_value_` do nothing without gradients, as `clip_grad_norm_`; torch raises an error.

    Returns:
        Undoes it.
    """
    module, name = torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype"
    original: Callable[[Sequence[Sequence[Tensor]]], dict[Any, Any]] | None = getattr(module, name, None)
    if original is None:
        return lambda: None

    def group(tensors: Sequence[Sequence[Tensor]]) -> dict[Any, Any]:
        return original(tensors) if tensors[0] else {}

    setattr(module, name, group)
    return lambda: setattr(module, name, original)


@contextmanager
def skipping_outside_kernel(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a GradScaler decide itself whether a fused optimizer makes a step, instead of its kernel."""
    mark = "_step_supports_amp_scaling"
    fused = vars(optimizer).pop(mark, None)
    try:
        yield
    finally:
        if fused is not None:
            setattr(optimizer, mark, fused)


def divide_in_place(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide each tensor by `divisor`, with one kernel for many of them."""
    if tensors:
        _private(torch, "_foreach_div_", "to divide gradients")(tensors, divisor)


def flatten_together(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements of `tensors` in one dimension.

    One call; `torch.cat` needs a view of each tensor first.
    """
    if len(tensors) == 1:
        return tensors[0].flatten().clone()  # torch would return a view.
    flatten: Callable[[Sequence[Tensor]], Tensor] = _private(
        torch._C._nn, "flatten_dense_tensors", "to read the norms of small gradients"
    )
    return flatten(tensors)


# -- optimizers ----------------------------------------------------------------------------------------------


def is_optimizer_hook_table(attribute: str) -> bool:
    """Whether `attribute` of a `torch.optim.Optimizer` holds hooks of its step or its state.

    `Optimizer.__getstate__` leaves them out too, and `Optimizer.__setstate__` makes new ones.
    """
    return attribute.startswith("_optimizer_")


def lr_at_position(scheduler: LRScheduler) -> list[float] | None:
    """Return the learning rates of a schedule at its position, from its arguments alone.

    The public interface gives those that follow from the learning rates of the last step, which may be 0.

    Args:
        scheduler: the scheduler.

    Returns:
        One for each parameter group. None if such a scheduler cannot tell.
    """
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed_form is None else [float(lr) for lr in closed_form()]


# -- models --------------------------------------------------------------------------------------------------


def call_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Return what `model(...)` calls: `forward`, or its compiled form after `model.compile()`."""
    compiled: Callable[..., Any] | None = _private(model, "_compiled_call_impl", "to run a compiled model")
    return model.forward if compiled is None else compiled


def override_call(model: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let `model(...)` call `call`, in place of `call_of(model)`.

    A replaced `forward` of a model after `model.compile()` would be compiled together with what replaces it.
    """
    name = (
        "forward"
        if _private(model, "_compiled_call_impl", "to run a compiled model") is None
        else ("_compiled_call_impl")
    )
    setattr(model, name, call)


# -- process groups ------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the store of torch's default process group, for keys that need no collective call."""
    return _private(dist.distributed_c10d, "_get_default_store", "to learn which replicas end training")()


def tcp_store(
    host: str, port: int, world_size: int, *, is_master: bool, timeout: timedelta, listen_fd: int | None
) -> TCPStore:
    """Return a TCPStore that does not wait for the other ranks, served on a socket that already listens.

    Args:
        host, port: address of the server.
        world_size: number of ranks.
        is_master: whether this rank is the server.
        timeout: of the operations of the store.
        listen_fd: file descriptor of the listening socket, on the server; None to open a socket.
    """

    return TCPStore(
        host,
        port,
        world_size,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def local_process_group() -> dist.ProcessGroup:
    """Return a process group of this process alone, which no other process has to make too.

    `torch.distributed.new_group` requires a default process group of which it is a part.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=5))
    register = _private(group, "_register_backend", "to make a group of one process")
    kind = dist.ProcessGroup.BackendType.GLOO
    for device in ("cpu", "cuda"):
        register(torch.device(device), kind, backend)
    _private(group, "_set_default_backend", "to make a group of one process")(kind)
    return group


def reset_group_names() -> None:
    """Let the default process group that is made next have the name that it has in a new process.

    torch names groups by counting those of a process, and one whose formation fails counts until a default
    group is destroyed. Members with another name would wait for each other in vain.
    """
    world = _private(dist.distributed_c10d, "_world", "to form a group again after a failed formation")
    world.group_count = 0


def set_collective_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives of the default process group."""
    purpose = "to wait longer for a collective than for the formation"
    public: Callable[[timedelta], None] | None = getattr(dist, "set_timeout", None)
    if public is None:
        public = _private(dist.distributed_c10d, "_set_pg_timeout", purpose)
    public(timeout)


def nccl_options(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """Return arguments of `init_process_group` with which NCCL connects at the first collective on a GPU.

    torch 2.15 would connect at once, on the GPU of LOCAL_RANK, or else of the rank. That may be another GPU.
    And gloo's sockets, which are found among those that appear in `init_process_group`, would be confused
    with NCCL's. torch 2.9 connects at the first collective anyway, as does 2.15 with TORCH_DIST_USE_NCCL2=0.

    Args:
        device: of the tensors, with an index.
        timeout: of the group.
    """
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "lazy_init") or os.environ.get("TORCH_DIST_USE_NCCL2") == "0":
        return {}
    options.lazy_init, options._timeout = True, timeout
    return {"device_id": device, "pg_options": options}


def abort_process_group() -> None:
    """End the NCCL kernels of the default process group that wait for a lost peer."""
    backend = _private(dist.group.WORLD, "_get_backend", "to end kernels that wait for a lost peer")(
        torch.device("cuda")
    )
    backend.abort()


# -- DistributedDataParallel ---------------------------------------------------------------------------------


def replace_process_group(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let DDP average its gradients over another process group. No backward pass runs.

    `DistributedDataParallel._update_process_group` would fill the buckets again, in an order that depends on
    the past of each process.
    """
    replace = _private(ddp.reducer, "_update_process_group", "to change the number of replicas in place")
    replace(group)
    ddp.process_group = group


def abandon(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Detach DDP from its parameters and its process group, after a backward pass that has failed.

    Args:
        ddp: is not used afterwards.
        group: replaces its process group, which the caller destroys.
    """
    purpose = "to continue after the loss of a replica"
    _private(ddp.reducer, "_reset_state", purpose)()
    _private(ddp.reducer, "_remove_autograd_hooks", purpose)()
    replace_process_group(ddp, group)


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Fill the buckets of DDP in the order of its parameters, before the first step.

    DDP starts with a guess and fills its buckets again after one step. The order in which the gradients of
    three or more replicas are added up depends on their place in the buckets, so a restarted program would
    round its first step differently from a program that continues. A rank without data rebuilds its buckets
    with the same two functions, in `DistributedDataParallel.join`.
    """
    purpose = "to make the first step of a restarted program equal to the bit"
    _private(ddp.reducer, "_push_all_rebuilt_params", purpose)()
    _private(ddp.reducer, "_rebuild_buckets", purpose)()


def set_timing_interval(ddp: DistributedDataParallel, steps: int) -> None:
    """Let DDP time each n-th backward pass that exchanges gradients. Its default is 100.

    On a GPU, the program waits for the end of the timed pass in the next forward pass.
    """
    _private(ddp, "_set_ddp_runtime_logging_sample_rate", "to measure the exchange of gradients")(steps)


def timed_backward_pass(ddp: DistributedDataParallel) -> tuple[int, float] | None:
    """Return the last backward pass that DDP has timed; None if it has timed no pass yet.

    The hooks of a program see the gradients before the exchange, and no hook is called at its end on a GPU.

    Returns:
        the number of the pass, from 1, among those that exchange gradients; and the seconds from the end of
        the computation to the end of the exchange.
    """
    data = _private(ddp, "_get_ddp_logging_data", "to measure the exchange of gradients")()
    exchange, hidden = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if not exchange or hidden is None:
        return None
    return int(data["iteration"]), max(exchange - hidden, 0) / 1e9


def communication_hooks(ddp: DistributedDataParallel) -> list[Callable[..., Any]]:
    """Return the functions that were registered by `ddp.register_comm_hook`."""
    hooks = _private(
        ddp, "_comm_hooks", "to detect whether gradients are compressed before they are averaged"
    )
    return [hook for hook, _ in hooks]


def is_in_join(joinable: Joinable) -> bool:
    """Whether `joinable` takes part in a `torch.distributed.algorithms.join.Join` context now."""
    config = _private(joinable, "_join_config", "to detect whether peers may have run out of data")
    return bool(config.enable)


# -- fully_shard (FSDP2) -------------------------------------------------------------------------------------


def is_fully_sharded(model: torch.nn.Module | None) -> bool:
    """Whether `fully_shard` was applied to `model` itself. Does not import FSDP2."""
    return hasattr(model, "set_requires_gradient_sync")


class ShardedParameterGroup:
    """The parameters of a module that FSDP2 reduces the gradients of together.

    Public interfaces show neither the gradients of this rank nor which backward passes were synchronised.

    Args:
        module: that `fully_shard` was applied to.
        group: FSDP2's own object for the parameters.
    """

    def __init__(self, module: FSDPModule, group: Any) -> None:
        self._module = module
        self._group = group
        self._parameters = _private(group, "fsdp_params", "to measure a model with fully_shard")

    @property
    def parameters(self) -> list[Tensor]:
        """Shards that the module has as parameters."""
        return [parameter.sharded_param for parameter in self._parameters]

    @property
    def sharded_by_fsdp_alone(self) -> list[Tensor]:
        """The `parameters` that were ordinary tensors before `fully_shard`, and not DTensors."""
        return [parameter.sharded_param for parameter in self._parameters if not parameter.is_dtensor]

    @property
    def shard_sizes(self) -> list[int]:
        """For each parameter, the elements that a rank has of it, with padding."""
        return [parameter.padded_sharded_param_size.numel() for parameter in self._parameters]

    @property
    def shard_count(self) -> int:
        """Ranks that one copy of the parameters is spread over."""
        return int(self._parameters[0].sharded_param.device_mesh.size(-1))

    @property
    def has_trainable_parameter(self) -> bool:
        """Whether not all parameters are frozen."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def awaits_all_reduce(self) -> bool:
        """Whether gradients were reduce-scattered and not yet averaged over replicas (HSDP)."""
        purpose = "to measure a model with fully_shard over replicas of shards"
        return _private(self._group, "_partial_reduce_output", purpose) is not None

    def on_post_backward(self, before: Callable[[bool], None], after: Callable[[bool], None]) -> None:
        """Call functions around the end of the group's part in each backward pass.

        FSDP2 calls its method `post_backward` there, on passes with and without a reduce-scatter. An
        exception of that method leaves out `after`.

        Args:
            before, after: given whether gradients are synchronised on this pass.
        """
        group = self._group
        post_backward = _private(group, "post_backward", "to count the backward passes of fully_shard")

        def observed_post_backward(*arguments: Any) -> None:
            before(group.reduce_grads)
            post_backward(*arguments)
            after(group.reduce_grads)

        group.post_backward = observed_post_backward

    def on_reduce_scatter(self, observe: Callable[[Tensor], None]) -> None:
        """Call `observe` with the input of each reduce-scatter of the group, before it starts.

        The input has the gradients of this rank: for each rank in turn, its piece of each parameter with a
        gradient, padded to `shard_sizes`.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        class ObservedReduceScatter(ReduceScatter):
            def __init__(self, inner: ReduceScatter) -> None:
                self._inner = inner

            def allocate(
                self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
            ) -> Tensor:
                return self._inner.allocate(size, dtype=dtype, device=device)

            def __call__(
                self,
                output_tensor: Tensor,
                input_tensor: Tensor,
                group: dist.ProcessGroup,
                op: Any,
                async_op: bool = False,
            ) -> dist.Work | None:
                observe(input_tensor)
                return self._inner(output_tensor, input_tensor, group, op, async_op)

        inner = _private(self._group, "_reduce_scatter_comm", "to read gradients of fully_shard")
        self._module.set_custom_reduce_scatter(ObservedReduceScatter(inner))


def sharded_parameter_groups(model: torch.nn.Module) -> list[ShardedParameterGroup]:
    """Return the parameter groups of all modules in `model` that `fully_shard` was applied to."""
    from torch.distributed.fsdp import FSDPModule

    return [
        ShardedParameterGroup(module, group)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _parameter_groups_of(module)
    ]


def _parameter_groups_of(module: FSDPModule) -> Sequence[Any]:
    """FSDP2's own objects. Older versions have at most one object for each module, under another name."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = _private(state, "_fsdp_param_group", "to measure a model with fully_shard")
    return [] if group is None else [group]


def reduce_scatter_predivisor(ranks: int, dtype: torch.dtype) -> int:
    """Return what FSDP2 has divided gradients by before the reduce-scatter.

    About the square root of `ranks` for float16, to avoid an overflow; 1 for types with a wide range.
    """
    divisor = 1
    if dtype not in (torch.float32, torch.bfloat16):
        while ranks % divisor == 0 and ranks / divisor > divisor:
            divisor *= 2
    return divisor
