"""Modules and `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.torch_private import private_part


def replace_process_group(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let DDP average its gradients over another process group. No backward pass runs.

    `DistributedDataParallel._update_process_group` would fill the buckets again, in an order that depends on
    the past of each process.
    """
    replace = private_part(ddp.reducer, "_update_process_group", "to change the number of replicas in place")
    replace(group)
    ddp.process_group = group


def abandon(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Detach DDP from its parameters and its process group, after a backward pass that has failed.

    DDP is not used afterwards. The caller destroys the old process group.
    """
    purpose = "to continue after the loss of a replica"
    private_part(ddp.reducer, "_reset_state", purpose)()
    private_part(ddp.reducer, "_remove_autograd_hooks", purpose)()
    replace_process_group(ddp, group)


def rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Fill the buckets of DDP in the order of its parameters, before the first step, as `join` of DDP does.

    DDP does so after one step. The order in which gradients of three or more replicas are added up depends on
    their place in the buckets, so a restarted program would round its first step differently.
    """
    purpose = "to make the first step of a restarted program equal to the bit"
    private_part(ddp.reducer, "_push_all_rebuilt_params", purpose)()
    private_part(ddp.reducer, "_rebuild_buckets", purpose)()


def set_timing_interval(ddp: DistributedDataParallel, steps: int) -> None:
    """Let DDP time each n-th backward pass that exchanges gradients. Its default is 100.

    On a GPU, the program waits for the end of the timed pass in the next forward pass.
    """
    private_part(ddp, "_set_ddp_runtime_logging_sample_rate", "to measure the exchange of gradients")(steps)


def timed_backward_pass(ddp: DistributedDataParallel) -> tuple[int, float] | None:
    """Return the last backward pass that DDP has timed; None if it has timed no pass yet.

    That is its number among those that exchange gradients, from 1, and the seconds from the end of the
    computation to the end of the exchange. Hooks of a program see the gradients before the exchange.
    """
    data = private_part(ddp, "_get_ddp_logging_data", "to measure the exchange of gradients")()
    exchange, hidden = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if not exchange or hidden is None:
        return None
    return int(data["iteration"]), max(exchange - hidden, 0) / 1e9


def communication_hooks(ddp: DistributedDataParallel) -> list[Callable[..., Any]]:
    """Return the functions that were registered by `ddp.register_comm_hook`."""
    hooks = private_part(
        ddp, "_comm_hooks", "to detect whether gradients are compressed before they are averaged"
    )
    return [hook for hook, _ in hooks]


COMPILED = "_orig_mod."
"""The part of a name in a model's state that `torch.compile(model)` adds."""
EXTRA_STATE_SUFFIX: str = private_part(
    torch.nn.modules.module, "_EXTRA_STATE_KEY_SUFFIX", "to restore the extra state of modules"
)
"""How the name of the state ends that `torch.nn.Module.get_extra_state` returns."""


def unsaved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module itself that its state does not contain."""
    names = private_part(module, "_non_persistent_buffers_set", "to find what a module has changed")
    buffers = dict(module.named_buffers(recurse=False))
    return {name: buffers[name] for name in names if name in buffers}


_COMPILED_CALL = "_compiled_call_impl"


def call_of(model: torch.nn.Module) -> Callable[..., Any]:
    """Return what `model(...)` calls: `forward`, or its compiled form after `model.compile()`."""
    compiled: Callable[..., Any] | None = private_part(model, _COMPILED_CALL, "to run a compiled model")
    return model.forward if compiled is None else compiled


def override_call(model: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let `model(...)` call `call`, in place of `call_of(model)`.

    A replaced `forward` of a model after `model.compile()` would be compiled together with what replaces it.
    """
    compiled = private_part(model, _COMPILED_CALL, "to run a compiled model")
    name = "forward" if compiled is None else _COMPILED_CALL
    setattr(model, name, call)
