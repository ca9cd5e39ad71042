"""Process groups and stores, and `fully_shard` (FSDP2)."""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable

from adascale_worker.torch_private import private_part
from adascale_worker.torch_private.autograd import backward_pass_id

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def default_store() -> Any:
    """Return the store of torch's default process group, for keys that need no collective call."""
    return private_part(dist.distributed_c10d, "_get_default_store")()


def process_group_beside(
    store: Any, rank: int, size: int, device: torch.device, timeout: timedelta, *, share_a_gpu: bool
) -> dist.ProcessGroup:
    """Return a process group of processes that have different default process groups.

    `torch.distributed.new_group` requires a default process group of which it is a part.
    """
    group = dist.ProcessGroup(store, rank, size)
    register = private_part(group, "_register_backend")
    set_default = private_part(group, "_set_default_backend")
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)  # type: ignore[attr-defined]
    register(torch.device("cpu"), kinds.GLOO, gloo)
    set_default(kinds.GLOO)
    if device.type == "cuda" and share_a_gpu:
        register(torch.device("cuda"), kinds.GLOO, gloo)
    elif device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)  # type: ignore[attr-defined]
        register(torch.device("cuda"), kinds.NCCL, nccl)
        set_default(kinds.NCCL)
    return group


@contextmanager
def loopback_gloo() -> Iterator[None]:
    """Let groups of gloo that are made meanwhile listen on the loopback interface only."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    interface = next((each for _, each in socket.if_nameindex() if each in ("lo", "lo0")), None)
    if interface is not None:
        os.environ[name] = interface
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif interface is not None:
            del os.environ[name]


_ended_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def end_default_group(error: Callable[[], Exception]) -> None:
    """Destroy the default process group and all that were made beside it, and refuse their use from now on.

    A program may still have one of them. torch would let it communicate with the processes that were in it,
    or with itself alone, which is a wrong result.
    """
    module = dist.distributed_c10d
    groups = list(private_part(module, "_world").pg_map)
    dist.destroy_process_group()
    refuse_groups(groups, error)


def refuse_groups(groups: Iterable[dist.ProcessGroup], error: Callable[[], Exception]) -> None:
    """Refuse collective calls of the program with `groups` from now on."""
    module = dist.distributed_c10d
    _ended_groups.update(groups)
    # All collective calls with a group ask this function first.
    is_other = private_part(module, "_rank_not_in_group")
    if not hasattr(is_other, "refuses_ended_groups"):

        def refuse_ended(group: Any) -> Any:
            if group is not None and group in _ended_groups:
                raise error()
            return is_other(group)

        refuse_ended.refuses_ended_groups = True  # type: ignore[attr-defined]
        module._rank_not_in_group = refuse_ended  # type: ignore[assignment]


def reset_group_names() -> None:
    """Let the default process group that is made next have the name that it has in a new process.

    torch names groups by counting those of a process, and one whose formation fails counts until a default
    group is destroyed. Members with another name would wait for each other in vain.
    """
    world = private_part(dist.distributed_c10d, "_world")
    world.group_count = 0


def set_timeout_of(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of collectives of a process group."""
    for backend in _backends_of(group):
        private_part(backend, "_set_default_timeout")(timeout)


def _backends_of(group: dist.ProcessGroup) -> list[Any]:
    devices = private_part(group, "_device_types")
    get = private_part(group, "_get_backend")
    return list({id(backend): backend for backend in map(get, devices)}.values())


def nccl_options(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """Return arguments of `init_process_group` with which NCCL connects at the first collective on a GPU.

    torch 2.15 would connect at once, on the GPU of LOCAL_RANK or of the rank, which may be another one. And
    the sockets of NCCL would be taken for those of Gloo, which are found among the new ones.
    """
    # torch 2.9 connects at the first collective anyway, as does 2.15 with TORCH_DIST_USE_NCCL2=0.
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "lazy_init") or os.environ.get("TORCH_DIST_USE_NCCL2") == "0":
        return {}
    options.lazy_init, options._timeout = True, timeout
    return {"device_id": device, "pg_options": options}


def init_default_group(backend: str, device: torch.device, timeout: timedelta, **place: Any) -> None:
    """Initialize torch's default process group, with a store, rank and world size or by the environment."""
    options = nccl_options(device, timeout) if "nccl" in backend else {}
    hook = sys.excepthook
    dist.init_process_group(backend, timeout=timeout, **place, **options)
    if place:
        # torch replaces it by a hook that adds the rank, once more for each group.
        sys.excepthook = hook


def abort_process_group(group: dist.ProcessGroup | None) -> None:
    """End the NCCL kernels of a process group, by default torch's, that wait for a lost peer."""
    group = dist.group.WORLD if group is None else group
    backend = private_part(group, "_get_backend")(torch.device("cuda"))
    backend.abort()


def is_in_join(joinable: Joinable) -> bool:
    """Whether `joinable` takes part in a `torch.distributed.algorithms.join.Join` context now."""
    config = private_part(joinable, "_join_config")
    return bool(config.enable)


_CONNECTION_ERRORS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "software caused connection abort",
    "connection refused",
    # Of a network that has become silent, and of hosts and routes that are gone.
    "connection timed out",
    "no route to host",
    "network is unreachable",
    "network is down",
    "host is down",
    # Of NCCL, and of torch after the communicator is aborted.
    "remote process exited or there was a network error",
    "communicator was aborted",
)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether `error`, or an error that caused it, means that the connection to another replica is lost.

    Gloo raises a plain RuntimeError for this, so only its message identifies it.
    """
    while error is not None:
        if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
            return True
        if isinstance(error, RuntimeError):
            message = str(error).lower()
            from_backend = "gloo" in message or "nccl" in message
            if from_backend and any(fragment in message for fragment in _CONNECTION_ERRORS):
                return True
        error = error.__cause__ or error.__context__
    return False


def is_fully_sharded(model: torch.nn.Module | None) -> bool:
    """Whether `fully_shard` was applied to `model` itself. Does not import FSDP2."""
    return hasattr(model, "set_requires_gradient_sync")


def reshard(model: torch.nn.Module) -> None:
    """Replace whole parameters of a model, after a forward pass without gradients, by their shards."""
    for module in model.modules():
        if is_fully_sharded(module):
            module.reshard()  # type: ignore[operator]


class ShardedParameterGroup:
    """The parameters of a module whose gradients FSDP2 reduces together.

    Public interfaces show neither the gradients of this rank nor which backward passes were synchronized.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._parameters = private_part(group, "fsdp_params")
        self.unreduced: set[int] = set()
        """The backward passes whose gradients are on the rank, also after `zero_grad()`."""
        self.reduced: list[set[int]] = []
        """The passes that each observed reduce-scatter has taken the sum of."""

    @property
    def parameters(self) -> list[Tensor]:
        """Shards that the module has as parameters."""
        return [parameter.sharded_param for parameter in self._parameters]

    @property
    def sharded_by_fsdp_alone(self) -> list[Tensor]:
        """The `parameters` that are sharded over the mesh of `fully_shard`, and over no other dimension."""
        return [
            parameter.sharded_param
            for parameter in self._parameters
            if not parameter.is_dtensor or parameter.sharded_param.device_mesh == parameter.mesh_info.mesh
        ]

    @property
    def shard_sizes(self) -> list[int]:
        """The number of elements of each parameter that a rank has, with padding."""
        return [parameter.padded_sharded_param_size.numel() for parameter in self._parameters]

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks that gradients are reduced over; parameters are sharded along its last dimension."""
        mesh: DeviceMesh = self._parameters[0].sharded_param.device_mesh
        return mesh

    @property
    def gradient_divisor(self) -> float | None:
        """The divisor of the gradients that the program has set; None for the number of ranks.

        None also with versions of torch that have it in another place.
        """
        return getattr(self._group, "gradient_divide_factor", None)

    @property
    def has_trainable_parameter(self) -> bool:
        """Whether at least one parameter is trained."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def awaits_all_reduce(self) -> bool:
        """Whether gradients were reduce-scattered and not yet averaged over replicas (HSDP)."""
        return private_part(self._group, "_partial_reduce_output") is not None

    def observe(self, on_reduce_scatter: Callable[[Tensor, dist.ProcessGroup], None]) -> None:
        """Record which passes are reduced together, and call a function before each reduce-scatter.

        It gets its ranks, and its input, the gradients of this rank: for each rank in turn, its piece of each
        parameter with a gradient, padded to `shard_sizes`.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

        group, unreduced, reduced = self._group, self.unreduced, self.reduced
        post_backward = private_part(group, "post_backward")

        def observed_post_backward(*arguments: Any) -> None:
            # Ends the group's part of a backward pass, with or without a reduce-scatter.
            if not group.reduce_grads:
                unreduced.add(backward_pass_id())
            post_backward(*arguments)
            if group.reduce_grads:  # the gradients were reduced, or there were none
                unreduced.clear()

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
                reduced.append(unreduced | {backward_pass_id()})
                on_reduce_scatter(input_tensor, group)
                return self._inner(output_tensor, input_tensor, group, op, async_op)

        group.post_backward = observed_post_backward
        # FSDPModule.set_custom_reduce_scatter refuses modules with parameters on different meshes.
        group._reduce_scatter_comm = ObservedReduceScatter(private_part(group, "_reduce_scatter_comm"))


def sharded_parameter_groups(model: torch.nn.Module) -> list[ShardedParameterGroup]:
    """Return the parameter groups of all modules in `model` that `fully_shard` was applied to."""
    from torch.distributed.fsdp import FSDPModule

    groups = {
        id(group): ShardedParameterGroup(group)  # modules that were sharded together have the same
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in _parameter_groups_of(module)
    }
    return list(groups.values())


def _parameter_groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return FSDP2's own objects: in older versions at most one for each module, under another name."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = private_part(state, "_fsdp_param_group")
    return [] if group is None else [group]


def micro_gradient_factor(ranks: int, dtype: torch.dtype, divisor: float | None) -> float:
    """Return the gradient of a rank over what FSDP2 reduce-scatters, where `.grad` is the mean over `ranks`.

    It sums and divides by `divisor` (`set_gradient_divide_factor`; None for `ranks`), in types other than
    float32 and bfloat16 by about the root of it before the reduce-scatter, to avoid an overflow.
    """
    factor = ranks if divisor is None else divisor
    divided_before = 1
    if dtype not in (torch.float32, torch.bfloat16):
        while factor % divided_before == 0 and factor / divided_before > divided_before:
            divided_before *= 2
    return divided_before * ranks / factor
