"""Models that the frameworks' settings shard over the processes of a replica."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.testing import assert_close

from adascale_worker.errors import WorkerError
from support.launch import run_python

PROGRAM = Path(__file__).parent / "programs" / "sharded.py"
BF16, FP32 = torch.bfloat16, torch.float32
ZERO: dict[str, Any] = {"zero_optimization": {"stage": 3}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


def network() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "head": nn.Linear(4, 2)})


def states(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the files with states that a program has written, by name."""
    for path in sorted(folder.rglob("*")):
        if (path.suffix in (".pt", ".ckpt") and path.stem != "best") or path.name == "optimizer.bin":
            state = torch.load(path, weights_only=False)
            yield (
                str(path.relative_to(folder)),
                {
                    name: value
                    for name, value in state.items()
                    if name in ("state", "state_dict", "optimizer_states") or isinstance(value, torch.Tensor)
                },
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "shards", "processes"),
    [
        ("accelerate", "fsdp", 4),  # of a layer with two rows
        ("accelerate", "deepspeed", 2),
        ("lightning", "fsdp", 2),
    ],
)
def test_sharded_replicas_train_as_the_plain_framework(
    tmp_path: Path, framework: str, shards: str, processes: int
) -> None:
    """Four processes of one or two replicas: losses, metrics and files are those of one plain process."""
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    run_python(PROGRAM, FRAMEWORK=framework, OUTPUT=plain)
    run_python(
        PROGRAM,
        replicas=4,
        FRAMEWORK=framework,
        OUTPUT=sharded,
        SHARDS=shards,
        ADASCALE_PROCESSES_PER_REPLICA=processes,
    )
    expected = json.loads((plain / "result-0").read_text())
    for process in range(4):
        found = json.loads((sharded / f"result-{process}").read_text())
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert value == pytest.approx(expected[name], rel=1e-5), name
    ours, theirs = dict(states(sharded)), dict(states(plain))
    assert ours.keys() == theirs.keys()
    for name, state in ours.items():
        assert_close(state, theirs[name], rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ZERO, (True, BF16, BF16, None)),
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}}, (False, None, FP32, None)),
        ({**ZERO, "bf16": {"enabled": True}, "gradient_clipping": 0.5}, (True, BF16, BF16, 0.5)),
        ({**ZERO, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}, (True, BF16, BF16, 2.0)),
        ({**ZERO, "communication_data_type": "auto"}, (True, BF16, BF16, None)),
        (
            {**ZERO, "bf16": {"enabled": True}, "communication_data_type": "fp32", "steps_per_print": 9},
            (True, BF16, FP32, None),
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "none"},
                    "overlap_comm": True,
                    "reduce_bucket_size": 5e8,
                },
                "bf16": {"enabled": False},
                "fp16": {"enabled": False, "loss_scale": 0},
                "train_batch_size": "auto",
            },
            (False, None, FP32, None),
        ),
    ],
)
def test_a_deepspeed_configuration_becomes_that_of_fully_shard(
    tmp_path: Path, config: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    from adascale_frameworks.sharding import Sharding

    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    for source in (config, file, str(file)):
        made = Sharding.of_deepspeed(source, network(), bf16=True, gradient_clipping=2.0)
        assert (made.reshards, made.precision.param_dtype, made.precision.reduce_dtype, made.max_norm) == (
            expected
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bf16": True, **ZERO}, "bf16=True .* is no JSON object"),
        ({}, r"zero_optimization.stage='None' .*: use 1, 2 or 3"),
        ({**ZERO, "optimizer": {"type": "AdamW"}}, r"optimizer=.*the program makes it"),
        ({**ZERO, "train_batch_size": 32}, r"train_batch_size=32 .* Use 'auto'"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage='auto'"),
        ({"zero_optimization": {"stage": 3, "offload_param": True}}, "offload_param=True"),
        ({**ZERO, "gradient_clipping": "x"}, "gradient_clipping='x'"),
        ({**ZERO, "fp16": {"enabled": True}}, r"fp16=True"),
        ({**ZERO, "communication_data_type": "fp16"}, "communication_data_type='fp16'"),
        ({**ZERO, "flops_profiler": {"enabled": True}}, r"flops_profiler=.*: leave it out"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            r"zero_optimization.offload_param=.*stay on the device",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8"),
    ],
)
def test_a_field_of_deepspeed_without_a_meaning_is_refused(config: dict[str, Any], message: str) -> None:
    from adascale_frameworks.sharding import Sharding

    with pytest.raises(WorkerError, match=message):
        Sharding.of_deepspeed(config, network())


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_file_without_a_deepspeed_configuration_is_refused(tmp_path: Path, text: str | None) -> None:
    from adascale_frameworks.sharding import Sharding

    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(WorkerError, match=r"the DeepSpeed configuration '.*ds.json' is no JSON"):
        Sharding.of_deepspeed(file, network())


@pytest.mark.parametrize(
    ("options", "precision", "message"),
    [
        ({"fsdp_version": 1}, "no", r"fsdp_version=1 .*pass fsdp_version=2"),
        ({"cpu_offload": True}, "no", r"cpu_offload=True .*stay on the device"),
        ({"ignored_modules": "head"}, "no", "ignored_modules='head'"),
        ({"activation_checkpointing": True}, "no", "activation_checkpointing=True .*pass auto_wrap_policy"),
        ({"transformer_cls_names_to_wrap": ["Nothing"]}, "no", "Nothing in the model. .*: name the class"),
        ({}, "fp16", "Use bfloat16"),
    ],
)
def test_what_the_plugin_of_accelerate_has_without_a_meaning_is_refused(
    no_job: None, options: dict[str, Any], precision: str, message: str
) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from adascale_frameworks.sharding import Sharding

    if "transformer_cls_names_to_wrap" in options:
        options["auto_wrap_policy"] = "transformer_based_wrap"
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **options})
    with pytest.raises(WorkerError, match=message):
        Sharding.of_plugin(plugin, network(), precision)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_offload": True}, "cpu_offload=True"),
        ({"sharding_strategy": "NO_SHARD"}, "sharding_strategy='NO_SHARD' .*: use FULL_SHARD"),
        ({"ignored_modules": [nn.Linear(1, 1)]}, "ignored_modules="),
        ({"auto_wrap_policy": CustomPolicy(lambda _: False)}, "CustomPolicy as auto_wrap_policy: pass a set"),
    ],
)
def test_what_the_strategy_of_lightning_has_without_a_meaning_is_refused(
    options: dict[str, Any], message: str
) -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    from adascale_frameworks.sharding import Sharding

    with pytest.raises(WorkerError, match=message):
        Sharding.of_strategy(FSDPStrategy(**options))


def test_only_a_strategy_of_fsdp_says_how_a_module_is_sharded(no_job: None) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from adascale.lightning import ElasticStrategy

    with pytest.raises(WorkerError, match=r"fsdp=<.*DDPStrategy.*pass an FSDPStrategy"):
        ElasticStrategy(fsdp=DDPStrategy(), package="lightning.pytorch")


def test_a_part_with_a_parameter_of_others_is_not_sharded_alone() -> None:
    """As of an embedding that is the matrix of the head too."""
    from adascale_frameworks.sharding import selected

    model: Any = network()
    blocks, linears = ModuleWrapPolicy({Block}), ModuleWrapPolicy({nn.Linear})
    assert selected(model, None) == []
    assert selected(model, blocks) == [model["blocks"][1], model["blocks"][0]]
    assert len(selected(model, linears)) == 5
    assert selected(model, lambda **_: True)[-1] is not model["blocks"], "a list has no forward pass"
    model["blocks"][0].first.weight = model["blocks"][1].first.weight
    assert selected(model, blocks) == []
    assert len(selected(model, linears)) == 3
    large = partial(size_based_auto_wrap_policy, min_num_params=20)
    assert selected(model, large) == [model["blocks"][1].second, model["blocks"][0].second]


def test_trained_parameters_are_float32_outside_of_the_passes() -> None:
    from adascale_frameworks.sharding import Sharding

    model: Any = network().to(BF16)
    model["head"].requires_grad_(False)
    Sharding(upcasts=True).prepare(model)
    types = {name.partition(".")[0]: each.dtype for name, each in model.named_parameters()}
    assert types == {"blocks": FP32, "head": BF16}


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.empty(2, device="meta"), "on the meta device"),
        (torch.zeros(2, dtype=torch.int8), "of type torch.int8"),
        (torch.zeros(2, dtype=torch.float16), r"of type torch.float16: .* Use bfloat16"),
    ],
)
def test_a_parameter_that_cannot_be_sharded_is_refused(parameter: torch.Tensor, message: str) -> None:
    from adascale_frameworks.sharding import Sharding

    model = nn.Module()
    model.weight = nn.Parameter(parameter, requires_grad=parameter.is_floating_point())
    with pytest.raises(WorkerError, match=f"the parameter weight is {message}"):
        Sharding().prepare(model)


def test_metrics_and_averages_that_lightning_keeps_itself_are_refused_with_a_sharded_module() -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
    from torchmetrics import SumMetric

    from adascale_frameworks.lightning.refusals import require_shardable, require_tensors
    from adascale_frameworks.lightning.strategy import PACKAGES, ElasticStrategy

    results = _ResultCollection(training=False)
    options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
    results.log("validation_step", "loss", torch.tensor(1.0), **options)
    require_tensors(results)
    results.log("validation_step", "count", SumMetric(), **options)
    with pytest.raises(WorkerError, match=r"self.log\('count', .*torchmetrics.Metric.*: log a mean"):
        require_tensors(results)
    module, strategy = SimpleNamespace(automatic_optimization=False), ElasticStrategy(package=PACKAGES[0])
    with pytest.raises(WorkerError, match=r"EMAWeightAveraging is not supported .*: average"):
        require_shardable(
            SimpleNamespace(callbacks=[EMAWeightAveraging()], lightning_module=module), strategy
        )
    with pytest.raises(WorkerError, match="manual optimization is not supported"):
        require_shardable(SimpleNamespace(callbacks=[], lightning_module=module), strategy)
