"""The benchmarks that run on a GPU, which few of those who change them have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import accuracy
import elastic_overhead
import overhead
import rescale

from support.launch import run_python

BENCH = Path(overhead.__file__).parent
on_each_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)


def run(program: str, *arguments: object) -> str:
    """Run a benchmark, and return what it printed."""
    return run_python(BENCH / program, *arguments, timeout=280)


@pytest.mark.parametrize("program", [overhead, accuracy, elastic_overhead, rescale])
def test_without_a_gpu_the_device_cuda_is_refused_in_one_line(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["program.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--device cuda needs a GPU" in line
    assert "--device cpu" in line


IN_STEPS = "AdaScale, 0.8, in steps"


@pytest.mark.release
@pytest.mark.slow
def test_the_ramp_is_trained_in_pieces_and_reported(tmp_path: Path) -> None:
    folders = ("--size", "tiny", "--out", tmp_path, "--states", tmp_path / "states")
    contenders = ("small", "doubling", "AdaScale, 0.5", "Euclidean noise", "Seesaw", IN_STEPS)
    assert run("ramp.py", "train", *folders, "--minutes", 0.0).count("small") == 1
    results = tmp_path / "ramp.tiny.json"
    (begun,) = json.loads(results.read_text())["runs"]
    assert not begun["finished"]
    whole = run("ramp.py", "train", *folders, "--contenders", *contenders)
    runs = json.loads(results.read_text())["runs"]
    assert {each["contender"] for each in runs} == set(contenders), whole
    for each in runs:
        last = each["points"][-1]
        assert each["finished"]
        assert last["tokens"] >= each["tokens"]
        if each["contender"] == IN_STEPS:
            assert last["progress"] >= 64
        else:
            assert last["tokens"] < each["tokens"] + 32 * 16 * 2
        assert sum(int(scale) * steps for scale, steps in last["steps"].items()) >= 64
    assert run("ramp.py", "times", *folders).count('"8"') == 1
    table = run("ramp.py", "report", *folders)
    assert table.count("| AdaScale, 0.5 |") == table.count(f"| {IN_STEPS} |") == 1
    assert (tmp_path / "ramp.tiny.svg").read_text().count("doubling") == 1


@pytest.mark.release
@pytest.mark.slow
def test_the_critical_batch_size_is_measured_in_pieces_and_reported(tmp_path: Path) -> None:
    folders = ("--size", "tiny", "--out", tmp_path, "--states", tmp_path / "states")
    measure = ("measure", *folders, "--tokens", 4096, "--branch-steps", 32, "--micro-gradients", 32)
    assert run("critical_batch_size.py", *measure, "--minutes", 0.0) == ""
    whole = run("critical_batch_size.py", *measure, "--branch-seeds", 1)
    assert whole.count("seed 0") == 36
    assert run("critical_batch_size.py", *measure).count("seed 1") == 36
    results = json.loads((tmp_path / "critical_batch_size.tiny.json").read_text())
    assert [len(results[name]) for name in ("points", "branches")] == [6, 72]
    for point in results["points"]:
        for metric in ("adamw", "euclidean"):
            assert all(len(each) == 2 and each[1] > 0 for each in point[metric]["precise"])
            assert point[metric]["smoothed"][1] > 0
    table = run("critical_batch_size.py", "report", *folders)
    assert table.count("2 seed(s)") == 1
    assert (tmp_path / "critical_batch_size.tiny.svg").read_text().count("critical batch size") == 1


@pytest.mark.parametrize(
    ("network", "least", "most"),
    [("resnet18", 11_173_962, 11_173_962), ("transformer", 90_000_000, 110_000_000)],
)
def test_the_networks_for_a_gpu_have_the_size_of_their_names(network: str, least: int, most: int) -> None:
    with torch.device("meta"):
        model, *_ = overhead.NETWORKS[network]()
    assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most


def test_the_transformer_sees_no_later_tokens_and_no_other_sequence() -> None:
    torch.manual_seed(0)
    model = overhead.Transformer(vocabulary=20, length=6, width=8, heads=2)
    x = torch.randint(20, (12,))
    changed = x.clone()
    changed[4:6] = (x[4:6] + 1) % 20
    is_equal = (model(x) == model(changed)).all(1)
    assert is_equal.tolist() == [True] * 4 + [False] * 2 + [True] * 6


@on_each_device
def test_the_overhead_is_measured_on_each_device(device: str, tmp_path: Path) -> None:
    options = ["--device", device, "--blocks", 2, "--steps", 1, "--json", tmp_path / "times"]
    printed = run("overhead.py", "deep", *options, "--contenders", "plain", "every step")
    assert "deep: plain step" in printed
    turns = json.loads((tmp_path / "times").read_text())["deep"]["every step"]
    assert len(turns) == 2
    assert all(seconds > 0 for turn in turns for seconds in turn)


@on_each_device
def test_what_a_step_does_is_counted_on_each_device(device: str, tmp_path: Path) -> None:
    options = ["--device", device, "--profile", "--steps", 1, "--json", tmp_path / "counts"]
    run("overhead.py", "deep", *options, "--contenders", "plain", "every step")
    counts = json.loads((tmp_path / "counts").read_text())["deep"]
    assert ("kernels" in counts["plain"]) == (device == "cuda")
    for what in {"operators", "kernels"} & set(counts["plain"]):
        assert 0 < counts["plain"][what] < counts["every step"][what]


@on_each_device
def test_the_cost_of_being_elastic_is_measured_on_each_device(device: str) -> None:
    printed = run("elastic_overhead.py", "tiny", "--device", device, "--blocks", 2, "--steps", 1)
    assert "elastic / trainer" in printed


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=[pytest.mark.slow, pytest.mark.release]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_change_of_the_replica_count_is_measured_on_each_device(device: str) -> None:
    options = ["--device", device, "--counts", "1,2,1", "--kill", 0, "--rounds", 1, "--steps", 5]
    printed = run("rescale.py", *options)
    assert "1 to 2: still" in printed
    assert "kill: next" in printed


@pytest.mark.release
@pytest.mark.slow
def test_a_loss_costs_no_sample_in_the_goodput_benchmark(tmp_path: Path) -> None:
    options = ["--contenders", "adascale", "--seconds", 20, "--step-seconds", 0.03]
    run("goodput.py", *options, "--json", tmp_path / "results", "--svg", tmp_path / "picture.svg")
    result = json.loads((tmp_path / "results").read_text())["results"]["one-a-minute"]["adascale"]
    assert (result["lost"], result["repeated"]) == (0, 0)
    assert len(result["losses"]) == 1
    assert "without losses" in (tmp_path / "picture.svg").read_text()


@pytest.mark.gpu
def test_the_accuracy_is_measured_on_a_gpu() -> None:
    rules = ["AdaScale", "FairScale", "exact gain"]
    printed = run("accuracy.py", "--device", "cuda", "--seeds", 1, "--scales", 128, "--rules", *rules)
    assert all(f"| {rule} | " in printed for rule in rules)


@pytest.mark.gpu
def test_all_contenders_make_steps_on_a_gpu() -> None:
    printed = run("overhead.py", "resnet18", "--device", "cuda", "--blocks", 2, "--steps", 1)
    assert all(f"  {name} " in printed for name in overhead.CONTENDERS if name != "plain")


@pytest.mark.gpu
def test_the_transformer_makes_steps_on_a_gpu() -> None:
    options = ["--device", "cuda", "--blocks", 2, "--steps", 1]
    printed = run("overhead.py", "transformer", *options, "--contenders", "plain", "every step")
    assert "transformer: plain step" in printed
