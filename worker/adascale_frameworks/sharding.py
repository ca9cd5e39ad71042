"""Models that `fully_shard` divides over the processes of a replica, as the settings of a framework say.

A framework would divide a model over all of its processes. Here these are those of a replica
(processesPerReplica), which share one copy of the model, on `ElasticTrainer.mesh`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from adascale_frameworks.common import refuse
from adascale_worker.errors import WorkerError
from adascale_worker.trainer import ElasticTrainer

Policy = Callable[..., bool]
"""Selects modules: an `auto_wrap_policy` of torch."""

_ALL = "all parameters are sharded, and stay on the device of their process. Leave it out"
_OF_PLUGIN = {
    "fsdp_version": "pass fsdp_version=2, or {'version': 2} in fsdp_config; `accelerate to-fsdp2` changes a "
    "configuration file",
    "cpu_offload": _ALL,
    "ignored_modules": _ALL,
    "param_init_fn": "make the model with its weights",
    "activation_checkpointing_offload": "activations stay on the device. Leave it out",
}
_OF_STRATEGY = {
    "cpu_offload": _ALL,
    "sharding_strategy": "use FULL_SHARD or SHARD_GRAD_OP",
    **dict.fromkeys(("ignored_modules", "ignored_states"), _ALL),
    "param_init_fn": "make the module with its weights",
    **dict.fromkeys(("device_mesh", "process_group"), "the processes are those of a replica. Leave it out"),
}
_OF_JOB = "the batch size is that of the program and of the job. Use 'auto'"
_OF_PROGRAM = "the program makes it; a Trainer of transformers by its TrainingArguments. Leave it out"
_OF_DEEPSPEED = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), _OF_JOB),
    "gradient_accumulation_steps": _OF_JOB,
    **dict.fromkeys(("optimizer", "scheduler"), _OF_PROGRAM),
    "zero_optimization.stage": "use 1, 2 or 3",
    "zero_optimization.offload_optimizer": _ALL,
    "zero_optimization.offload_param": _ALL,
    "activation_checkpointing": "call gradient_checkpointing_enable() of a model of transformers",
}
_WITHOUT_EFFECT = {"steps_per_print", "wall_clock_breakdown", "dump_state", "zero_allow_untested_optimizer"}
"""Fields of a DeepSpeed configuration that change neither weights nor where they are, and those of ZeRO."""
_ZERO_WITHOUT_EFFECT = {
    *("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"),
    *("allgather_partitions", "allgather_bucket_size", "round_robin_gradients", "sub_group_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
}
_NO_FLOAT16 = "it needs a GradScaler, which is not supported with processesPerReplica. Use bfloat16"
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded."""

    units: Policy | None = None  # whose parameters are gathered together, besides all others
    reshards: bool = True  # whether a unit frees its whole parameters after its forward pass
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    recomputed: Policy | None = None  # whose activations are computed again in the backward pass
    max_norm: float | None = None  # to which the framework itself would clip gradients
    upcasts: bool = False  # whether trained parameters are float32 outside of the passes

    def __post_init__(self) -> None:
        if torch.float16 in (self.precision.param_dtype, self.precision.reduce_dtype):
            raise WorkerError(f"a sharded model has the precision torch.float16: {_NO_FLOAT16}")

    @classmethod
    def of_plugin(cls, plugin: Any, model: nn.Module, precision: str) -> Sharding:
        """Read Accelerate's `FullyShardedDataParallelPlugin`, beside its `mixed_precision`."""
        settings = {name: getattr(plugin, name, None) for name in _OF_PLUGIN}
        settings["fsdp_version"] = plugin.fsdp_version if plugin.fsdp_version != 2 else None
        settings["cpu_offload"] = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
        refuse("with FSDP in an elastic job", settings, _OF_PLUGIN)
        if plugin.mixed_precision_policy is None and precision != "no":
            plugin.set_mixed_precision(precision)
        try:
            plugin.set_auto_wrap_policy(model)
        except ValueError as error:
            raise WorkerError(
                f"{error} It is named in transformer_cls_names_to_wrap of FullyShardedDataParallelPlugin, "
                "or transformer_layer_cls_to_wrap in a configuration: name the class of a module of the model"
            ) from error
        units = plugin.auto_wrap_policy
        if plugin.activation_checkpointing and units is None:
            raise WorkerError(
                "activation_checkpointing=True in FullyShardedDataParallelPlugin is for the modules that "
                "auto_wrap_policy selects, and there is none: pass auto_wrap_policy='transformer_based_wrap'"
            )
        return cls(
            units,
            bool(plugin.reshard_after_forward),
            plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            units if plugin.activation_checkpointing else None,
            upcasts=precision != "no",
        )

    @classmethod
    def of_deepspeed(cls, source: Mapping[str, Any] | str | Path, model: nn.Module, **auto: Any) -> Sharding:
        """Read a DeepSpeed configuration, or its file. `auto` has the values of the program, by field.

        ZeRO 1 and 2 keep whole parameters from the forward to the backward pass, ZeRO 3 gathers them twice.
        """
        config = dict(source if isinstance(source, Mapping) else _read(source))

        def section(name: str) -> Mapping[str, Any]:
            value = config.pop(name, None) or {}
            if not isinstance(value, Mapping):
                raise WorkerError(f"{name}={value!r} in the DeepSpeed configuration is no JSON object")
            return value

        def is_on(name: str) -> bool:
            value = section(name)
            enabled = value.get("enabled", False) if value else "auto"
            return bool(auto.get(name) if enabled == "auto" else enabled)

        def given(name: str) -> Any:
            """Return the value of a field that the program may decide."""
            value = config.pop(name, None)
            return auto.get(name) if value == "auto" else value

        zero, stage = section("zero_optimization"), None
        halves, max_norm = is_on("bf16"), given("gradient_clipping")
        reduce_type = given("communication_data_type") or ("bf16" if halves else "fp32")
        used = {name: value for name, value in config.items() if name not in _WITHOUT_EFFECT}
        for name, value in zero.items():
            device = value.get("device") if isinstance(value, Mapping) else value
            is_off = name.startswith("offload_") and device in (None, "none", False)
            if name == "stage":
                stage = value
            elif name not in _ZERO_WITHOUT_EFFECT and not is_off:
                used[f"zero_optimization.{name}"] = value
        used = {name: value for name, value in used.items() if value != "auto"}
        used |= {
            "fp16": is_on("fp16") or auto.get("fp16"),
            "communication_data_type": None if reduce_type in _TYPES else reduce_type,
            "gradient_clipping": None if isinstance(max_norm, int | float | None) else max_norm,
            "zero_optimization.stage": None if stage in (1, 2, 3) else str(stage),
        }
        ways = {**dict.fromkeys(used, "leave it out"), **_OF_DEEPSPEED}
        refuse("in the DeepSpeed configuration of an elastic job", used, ways)
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if halves else None, reduce_dtype=_TYPES[reduce_type]
        )
        return cls(_blocks_of(model), stage == 3, precision, max_norm=max_norm or None, upcasts=halves)

    @classmethod
    def of_strategy(cls, strategy: Any) -> Sharding:
        """Read Lightning's `FSDPStrategy`."""
        options = dict(strategy.kwargs)
        kind = getattr(strategy.sharding_strategy, "name", str(strategy.sharding_strategy))
        settings = {
            **{name: options.get(name) for name in _OF_STRATEGY},
            "cpu_offload": strategy.cpu_offload.offload_params,
            "sharding_strategy": kind if kind not in ("FULL_SHARD", "SHARD_GRAD_OP") else None,
        }
        refuse("in FSDPStrategy with ElasticStrategy", settings, _OF_STRATEGY)
        precision, recomputed = strategy.mixed_precision_config, strategy._activation_checkpointing_kwargs
        check = recomputed.get("check_fn")
        for name, policy in {"auto_wrap_policy": options.get("auto_wrap_policy"), **recomputed}.items():
            if policy is not None and not callable(policy):
                raise WorkerError(
                    f"FSDPStrategy got a policy of type {type(policy).__name__} as {name}: pass a set of "
                    "classes, or a function"
                )
        return cls(
            options.get("auto_wrap_policy"),
            kind == "FULL_SHARD",
            MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype),
            recomputed.get("auto_wrap_policy") or (check and (lambda module, **_: check(module))),
        )

    def apply(
        self,
        model: nn.Module,
        elastic: ElasticTrainer,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        methods: Iterable[str] = (),  # of the model, which call its forward pass
    ) -> None:
        """Shard a model in place, and give optimizers its new parameters in place of those before."""
        if isinstance(model, FSDPModule):
            model.to(elastic.device)  # A framework may have moved it.
            return
        self.prepare(model)
        mesh: Any = elastic.mesh
        for module in selected(model, self.recomputed):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        with _without_parameters(model, optimizers):
            for module in selected(model, self.units):
                fully_shard(module, mesh=mesh, mp_policy=self.precision, reshard_after_forward=self.reshards)
            fully_shard(model, mesh=mesh, mp_policy=self.precision)
        for name in methods:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        for each in model.modules():
            each.register_load_state_dict_pre_hook(_divide_loaded)

    def prepare(self, model: nn.Module) -> None:
        """Check the parameters of a model, and use float32 for those that are trained, if requested."""
        for name, parameter in model.named_parameters():
            if parameter.is_meta or not parameter.is_floating_point():
                kind = "on the meta device" if parameter.is_meta else f"of type {parameter.dtype}"
                raise WorkerError(
                    f"the parameter {name} is {kind}, which fully_shard does not support here: load a model "
                    "with its weights in each process, without quantization and cpu_ram_efficient_loading"
                )
            if self.upcasts and parameter.requires_grad:
                parameter.data = parameter.data.float()
            if parameter.dtype is torch.float16 and parameter.requires_grad:
                raise WorkerError(f"the parameter {name} is of type torch.float16: {_NO_FLOAT16}")


def _read(path: str | Path) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"the DeepSpeed configuration {str(path)!r} is no JSON file that can be read: {error}"
        ) from error
    if not isinstance(config, dict):
        raise WorkerError(f"the DeepSpeed configuration {str(path)!r} is no JSON object")
    return config


def _blocks_of(model: nn.Module) -> Policy | None:
    """Select the blocks of a model of transformers, or the modules in lists of any other."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    kinds = {type(module) for module in model.modules() if type(module).__name__ in names}
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return ModuleWrapPolicy(kinds or {type(each) for modules in lists for each in modules})


def selected(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """Return the parts of a model that a policy selects, children first.

    A part that has a parameter in common with others is not selected.
    """
    if policy is None:
        return []
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    selected, taken = [], set[int]()
    for module in reversed([*model.modules()][1:]):
        own = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        size = sum(p.numel() for p in module.parameters() if id(p) not in taken)
        is_apart = all(count == uses[each] for each, count in own.items())
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)  # without a forward pass
        if own and is_apart and not is_list and policy(module=module, recurse=False, nonwrapped_numel=size):
            selected.append(module)
            taken.update(own)
    return selected


@contextmanager
def _without_parameters(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Take parameters out of optimizers, and put those with the same names in afterwards."""
    groups = [group for each in optimizers for group in each.param_groups]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # Other parameters stay.
    kept = [[names.get(id(each), each) for each in group["params"]] for group in groups]
    for group in groups:
        group["params"] = []
    try:
        yield
    finally:
        sharded = dict(model.named_parameters())
        for group, each in zip(groups, kept, strict=True):
            group["params"] = [sharded[name] if isinstance(name, str) else name for name in each]


def _divided(value: Any, parameter: Any) -> Any:
    """Return a whole tensor as the parameter is sharded, and anything else as it is."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _divide_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if isinstance(module, FSDPModule):
        module.reshard()  # After an evaluation it may have whole parameters.
    for name, parameter in module.named_parameters(prefix.removesuffix("."), recurse=False):
        if name in state:
            state[name] = _divided(state[name], parameter)


def divide_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Let a sharded optimizer load also a state with whole tensors."""

    def divide(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        values = dict(state["state"])
        for number, parameter in zip(numbers, parameters, strict=False):
            own = values.get(number, {})
            values[number] = {name: _divided(value, parameter) for name, value in own.items()}
        return {**state, "state": values}

    optimizer.register_load_state_dict_pre_hook(divide)


def whole(elastic: ElasticTrainer, owner: Any) -> dict[str, Any]:
    """Return the state of a model or an optimizer, with whole tensors on the host in place of shards.

    All processes of the replica of rank 0 call it; on all but the first of them, it is empty. A parameter
    with several names is one tensor.
    """
    known: dict[int, Tensor] = {}

    def gather(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: gather(each) for name, each in value.items()}
        if isinstance(value, list):
            return [gather(each) for each in value]
        if not isinstance(value, DTensor):
            return value.detach() if isinstance(value, Tensor) else value
        # By the object, which is the same on all processes: some may have no part of a tensor.
        if id(value) not in known:
            tensor = value.full_tensor().detach()
            known[id(value)] = tensor.cpu() if elastic.is_main else tensor.new_empty(0)
        return known[id(value)]

    if elastic.rank > 0:
        return {}
    # Without `keep_vars`, each name has a tensor of its own.
    names = {"keep_vars": True} if isinstance(owner, nn.Module) else {}
    state: dict[str, Any] = gather(owner.state_dict(**names))
    return state if elastic.is_main else {}


def place_of(elastic: ElasticTrainer, *, is_sharded: bool) -> tuple[int, int]:
    """Return the index of this process among those of all replicas, and their number."""
    if not is_sharded:
        return elastic.rank, elastic.replicas
    mesh = elastic.mesh
    return elastic.rank * mesh.size() + mesh.get_local_rank(), elastic.replicas * mesh.size()
