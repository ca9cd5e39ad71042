"""The most replicas that a local run may have at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adascale_controller.local import machine
from adascale_controller.local.replica_limit import ReplicaLimit, ReplicaLimitError, replica_limit
from adascale_core.messages.job_spec import JobSpec
from support.definitions import changed, define
from support.fast_python import PYTHON

JOB = define("default.digits", JobSpec(4, 64, (4, 16), 2, 8, 1000))


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2,0", ["2", "0"]),
        ("0,-1,1", ["0"]),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_the_gpus_are_those_of_cuda_visible_devices(visible: str, devices: list[str]) -> None:
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == devices


@pytest.mark.parametrize(
    ("files", "probe", "devices"),
    [
        (["nvidia0", "nvidiactl"], "print(4)", ["0", "1", "2", "3"]),
        (["kfd"], "import os; print(os.environ['COUNT'])", ["0", "1"]),
        (["nvidiactl", "null"], "print(4)", []),
        (["nvidia0"], "print(0)", []),
        (["nvidia0"], "raise ImportError('no torch')", []),
        (["nvidia0"], "print('no number')", []),
    ],
)
def test_without_nvidia_smi_torch_is_asked_if_a_gpu_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], probe: str, devices: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in files:
        (tmp_path / name).touch()
    command = [sys.executable, "-c", probe]
    assert machine.visible_gpus({"COUNT": "2"}, tmp_path, command) == devices


def test_the_probe_of_torch_prints_a_number() -> None:
    command = [*PYTHON, *machine.TORCH_PROBE[2:]]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(printed) >= 0


def test_on_rocm_the_gpus_are_those_of_its_own_variable() -> None:
    environ = {"HIP_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert machine.visible_gpus(environ) == ["2", "3"]
    assert machine.gpu_environment(environ, "3") == dict.fromkeys(environ, "3")
    assert machine.gpu_environment({}, "3") == {"CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(
    ("devices", "cores", "limit"), [(["0", "1"], 16, 2), ([], 16, 16), ([], 4, 4), ([], 2, 4)]
)
def test_the_default_is_one_replica_per_gpu_or_core_and_at_least_four_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], cores: int, limit: int
) -> None:
    monkeypatch.setattr(machine, "cpu_cores", lambda: cores)
    assert machine.default_replica_limit(devices) == limit


@pytest.mark.parametrize(("replicas", "limit"), [(None, 6), (2, 2), (5, 5), (7, 6), (1024, 6)])
def test_the_replica_limit_of_the_job_lowers_the_limit_as_on_a_cluster(
    replicas: int | None, limit: int
) -> None:
    assert replica_limit(changed(JOB, replica_limit=replicas), 6, []) == ReplicaLimit(limit)


@pytest.mark.parametrize(
    ("replicas", "requested", "devices", "source"),
    [
        (None, 8, [], ""),
        (None, None, ["0", "1", "2"], "the default on this machine, with 3 GPUs, is 3"),
        (None, 5, [], "--replicas is 5"),
        (4, 5, [], "spec.replicaLimit is 4"),
    ],
)
def test_a_limit_below_that_of_the_job_has_a_reason(
    replicas: int | None, requested: int | None, devices: list[str], source: str
) -> None:
    assert replica_limit(changed(JOB, replica_limit=replicas), requested, devices).source == source


@pytest.mark.parametrize(
    ("machine_limit", "spares", "limit"),
    [
        (7, 1, ReplicaLimit(6, 1)),
        (6, 1, ReplicaLimit(5, 1)),
        (3, 2, ReplicaLimit(2, 1)),
        (2, 2, ReplicaLimit(2, 0)),
    ],
)
def test_spares_take_the_places_of_replicas_beyond_the_fewest(
    machine_limit: int, spares: int, limit: ReplicaLimit
) -> None:
    assert replica_limit(changed(JOB, spare_replicas=spares), machine_limit, []) == limit


@pytest.mark.parametrize(
    ("replicas", "requested", "devices", "message"),
    [
        (
            1,
            6,
            [],
            "digits needs at least 2 replicas, but spec.replicaLimit is 1: raise spec.replicaLimit to 2 or "
            "more, or lower spec.minReplicas",
        ),
        (
            None,
            1,
            [],
            "digits needs at least 2 replicas, but --replicas is 1: use --replicas 2 or more, or lower "
            "spec.minReplicas",
        ),
        (
            None,
            None,
            ["0"],
            "digits needs at least 2 replicas, but the default on this machine, with 1 GPU, is 1: use "
            "--replicas 2 or more, or lower spec.minReplicas",
        ),
        (
            None,
            3,
            ["0", "1"],
            "--replicas 3 exceeds the 2 GPUs of this machine, and each replica needs one; to train on the "
            "CPU, set CUDA_VISIBLE_DEVICES to the empty string",
        ),
    ],
)
def test_a_limit_that_the_job_or_the_machine_does_not_allow_is_an_error(
    replicas: int | None, requested: int | None, devices: list[str], message: str
) -> None:
    with pytest.raises(ReplicaLimitError) as raised:
        replica_limit(changed(JOB, replica_limit=replicas), requested, devices)
    assert str(raised.value) == message
    assert raised.value.exit_code == 2
