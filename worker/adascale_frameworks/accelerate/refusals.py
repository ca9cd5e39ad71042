"""What an elastic job refuses of Accelerate's constructor and environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from adascale_worker.errors import WorkerError

_SHARDED = "each replica of an elastic job has the whole model"
_ARGUMENTS = {
    "deepspeed_plugin": _SHARDED,
    "deepspeed_plugins": _SHARDED,
    "fsdp_plugin": _SHARDED,
    "megatron_lm_plugin": _SHARDED,
    "torch_tp_plugin": _SHARDED,
    "parallelism_config": _SHARDED,
}
_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": _SHARDED,
    "ACCELERATE_USE_FSDP": _SHARDED,
    "ACCELERATE_USE_MEGATRON_LM": _SHARDED,
    "ACCELERATE_USE_PARALLELISM_CONFIG": _SHARDED,
}


def refuse_unsupported(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Check the arguments of `Accelerator`, and what `accelerate config` sets in the environment."""
    for name, reason in _ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise WorkerError(f"ElasticAccelerator got {name}, but {reason}: leave it out")
    for name, reason in _VARIABLES.items():
        if environ.get(name, "").lower() in ("true", "1"):
            raise WorkerError(
                f"{name} is {environ[name]}, but {reason}: start the program without a configuration of "
                "`accelerate config` that uses it"
            )
    precision = arguments.get("mixed_precision") or environ.get("ACCELERATE_MIXED_PRECISION")
    if str(precision) == "fp8":
        raise WorkerError(
            "ElasticAccelerator got mixed_precision='fp8', which is not supported: use 'bf16' or 'fp16'"
        )
    if arguments.get("rng_types") is not None:
        raise WorkerError(
            "ElasticAccelerator got rng_types, but the trainer seeds each step itself, from seed=: "
            "leave it out"
        )
    for handler in arguments.get("kwargs_handlers") or ():
        if not isinstance(handler, DistributedDataParallelKwargs):
            continue
        hook = DDPCommunicationHookType(handler.comm_hook)
        if hook is not DDPCommunicationHookType.NO:
            raise WorkerError(
                f"DistributedDataParallelKwargs has comm_hook={hook.value!r}, but the trainer exchanges the "
                "gradients: leave it out"
            )
