"""Batches that do not fit into memory: in one process, and with real trainers and a scripted agent."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adascale import ElasticTrainer
from adascale_core.failures import EXIT_OUT_OF_MEMORY
from adascale_worker.gradients.step_failure import forward_without_activations, is_out_of_memory
from support.launch import PROGRAMS, run_program, wait_until
from support.members import Members, Trainer
from support.training import MakeTrainer, adamw, learn, samples, sgd, train

BOUNDS = {"batch_size": 32, "max_batch_size": 48, "local_bsz_bounds": [2, 16]}
"""Two replicas begin with local batches of 16."""


# -- one process, without an agent ----------------------------------------------------------------------


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *gradients: Tensor) -> Tensor:
        if len(gradients[0]) > 4:
            torch.empty(1 << 60)
        return gradients[0]


class Memory(nn.Module):
    """Memory for 4 samples of the activations of a forward or backward pass."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.failures = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "backward":
            backward: Tensor = _Backward.apply(x)
            return backward
        if self.place != "none" and len(x) > 4:
            self.failures += 1
            if self.place == "with graph" and not torch.is_grad_enabled():
                return x
            torch.empty(1 << 60)
        return x


def network_with(memory: Memory) -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), memory, nn.Dropout(0.2), nn.Linear(16, 2)
    return nn.Sequential(*layers)


def train_in_mixed_precision(trainer: ElasticTrainer, model: nn.Module) -> list[list[int]]:
    """Train two epochs with autocast, a GradScaler and clipping, and return the indices of each batch."""
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.program_reentry(model, optimizer, register={"scaler": scaler})
    batches = []
    for epoch in range(2):
        for index, x, y in trainer.dataloader(samples(48)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            batches.append(index.tolist())
        trainer.step(epoch)
    return batches


@pytest.mark.parametrize("place", ["forward", "with graph", "backward"])
def test_the_samples_of_a_step_that_does_not_fit_follow_in_smaller_batches(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def run(place: str, **bounds: Any) -> tuple[list[list[int]], dict[str, Tensor]]:
        trainer = make_trainer(batch_size=12, **bounds)
        model = network_with(Memory(place))
        if is_mixed:
            batches = train_in_mixed_precision(trainer, model)
        else:
            optimizer = sgd(model)
            trainer.program_reentry(model, optimizer)
            batches = train(trainer, model, optimizer, epochs=range(2), data=samples(48))
        assert trainer.steps == 8
        trainer.close()
        return batches, model.state_dict()

    is_mixed = place == "with graph"
    batches, state = run(place)
    # 12 and 6 samples did not fit; limits are half way to what has fit, which is nothing yet.
    assert [len(batch) for batch in batches] == [12, 6, *[3] * 32]
    expected_batches, expected = run("none", local_bsz_bounds=(1, 3))
    assert batches[2:] == expected_batches
    assert all(torch.equal(state[name], expected[name]) for name in expected), "weights and BatchNorm"
    assert "a local batch of 12 samples does not fit into the memory of cpu" in capsys.readouterr().err


def test_a_step_that_is_discarded_is_not_complete(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(batch_size=12)
    model = network_with(Memory("forward"))
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    complete = []
    for _, x, y in trainer.dataloader(samples(48)):
        optimizer.zero_grad()
        learn(model, x, y)
        complete.append(trainer.completes_step)
        assert all((parameter.grad is not None) == complete[-1] for parameter in model.parameters())
        optimizer.step()
    assert complete[:6] == [False, False, False, False, False, True]
    assert trainer.steps == 4


def test_with_the_upper_bound_auto_batches_grow_step_by_step_to_what_fits(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(batch_size=2, max_batch_size=48, local_bsz_bounds=(1, "auto"))
    planner = trainer._replica.planner
    planner.finished_step()
    assert planner._bounds_to_try().upper == 4
    assert planner.smaller_local_bsz() == 1


@pytest.mark.slow
def test_a_failed_allocation_of_a_process_with_limited_memory_is_recovered_from() -> None:
    program = PROGRAMS / "memory.py"
    run = run_program(program)
    assert run.returncode == 0, run.stderr
    assert "64 samples does not fit into the memory of cpu" in run.stderr
    steps = run.stdout.splitlines()
    assert len(steps) == 4
    assert not any(line.endswith("1 x 64") for line in steps)


# -- the parts ------------------------------------------------------------------------------------------


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        function()
    return caught.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (raised(lambda: torch.empty(1 << 60)), True),
        (raised(lambda: bytearray(1 << 60)), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (12x6 and 5x2)"), False),
        (raised(lambda: torch.zeros(2) + torch.zeros(3)), False),
        (OSError("out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_recognized_by_type_or_message(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_an_output_without_a_graph_has_the_shapes_of_the_whole_batch() -> None:
    sizes: list[int] = []

    def forward(x: Tensor, *, mask: Tensor, scale: float) -> OrderedDict[str, Any]:
        sizes.append(len(x))
        if len(x) > 4:
            torch.empty(1 << 60)
        assert x.shape == mask.shape
        return OrderedDict(logits=(x * mask * scale, [x]), loss=x.sum(), count=len(x))

    x = torch.arange(10.0, requires_grad=True)
    weight = torch.ones(3, requires_grad=True)
    output = forward_without_activations(forward, (x,), {"mask": torch.ones(10), "scale": 2.0}, 10, [weight])
    assert sizes == [10, 5, 2]
    assert type(output) is OrderedDict
    assert output["logits"][0].tolist() == [0, 2] * 5
    assert output["logits"][1][0].shape == (10,)
    assert output["loss"].shape == ()
    hooks: list[Tensor] = []
    logits = output["logits"][0]
    logits.register_hook(hooks.append)
    logits += 1.0
    gradients = torch.autograd.grad(logits.sum() + output["loss"], [x, weight])
    assert [gradient.tolist() for gradient in gradients] == [[0.0] * 10, [0.0] * 3]
    assert len(hooks) == 1


# -- under an agent -------------------------------------------------------------------------------------


def limits(trainer: Trainer) -> list[int]:
    """The limits that a trainer has reported."""
    return [message["local_bsz_limit"] for message in trainer.messages if message["type"] == "limited"]


@pytest.mark.parametrize(
    ("environ", "accelerator"), [({"ADASCALE_ACCELERATOR": "NVIDIA-T4"}, "NVIDIA-T4"), ({}, "cpu")]
)
def test_the_limits_of_a_trainer_are_for_the_type_of_accelerator_that_the_operator_has_chosen(
    make_members: Callable[..., Members], environ: dict[str, str], accelerator: str
) -> None:
    (trainer,) = make_members(BOUNDS=json.dumps(BOUNDS), **environ).start(1)
    assert [m["accelerator"] for m in trainer.messages if m["type"] == "ready"] == [accelerator]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "replica"),
    [("backward", 1), ("forward", 0), ("allocate", 1)],
)
def test_a_batch_that_does_not_fit_on_one_replica_is_repeated_in_smaller_batches_by_all(
    make_members: Callable[..., Members], place: str, replica: int
) -> None:
    job = make_members(BOUNDS=json.dumps(BOUNDS), EPOCHS=4, SHORT=place, FITS=5, SHORT_REPLICA=replica)
    trainers = job.start(2)
    job.activate(trainers)
    for expected in (8, 4):
        job.wait_holding(trainers)
        assert limits(trainers[replica])[-1] == expected
        assert not limits(trainers[1 - replica])
        job.activate(trainers, env={"ADASCALE_LOCAL_BSZ_LIMIT": str(expected)})
    assert len(job.finish()) == 1, "the weights are equal"
    job.require_complete_stream()
    assert {record["file"] for record in job.records()} == {f"{t.replica}-{t.pid}.jsonl" for t in trainers}
    assert all(len(record["indices"]) <= 32 for record in job.records())


@pytest.mark.slow
def test_a_replica_that_is_alone_repeats_its_step(make_members: Callable[..., Members]) -> None:
    job = make_members(BOUNDS=json.dumps(BOUNDS), EPOCHS=4, SHORT="forward", FITS=8)
    trainers = job.start(1)
    job.activate(trainers)
    job.wait_holding(trainers)
    assert limits(trainers[0]) == [8]
    job.activate(trainers, env={"ADASCALE_LOCAL_BSZ_LIMIT": "8"})
    job.finish()
    job.require_complete_stream()
    assert {len(record["indices"]) for record in job.records()} == {32}, "four batches of 8"


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1])
def test_after_an_error_outside_of_the_model_another_process_continues_without_losing_a_step(
    make_members: Callable[..., Members], tmp_path: Path, others: int
) -> None:
    bounds = {**BOUNDS, "checkpoint_dir": str(tmp_path / "state"), "checkpoint_interval": 1000}
    job = make_members(
        BOUNDS=json.dumps(bounds), EPOCHS=8, SHORT="loss", FITS=8, SHORT_AFTER=4, SHORT_REPLICA=0
    )
    short, *rest = job.start(1 + others)
    job.activate([short, *rest])
    job.wait(lambda: short.code is not None, "the process ends")
    assert short.code == EXIT_OUT_OF_MEMORY
    assert limits(short) == [8]
    if rest:
        job.wait_holding(rest)
    (replacement,) = job.start(1)
    job.activate([*rest, replacement], env={"ADASCALE_LOCAL_BSZ_LIMIT": "8"})
    job.finish()
    job.require_complete_stream()
    assert "Traceback" not in short.output.read_text()


@pytest.mark.slow
def test_a_batch_that_cannot_become_smaller_is_a_failure_of_the_program(
    make_members: Callable[..., Members],
) -> None:
    bounds = {**BOUNDS, "local_bsz_bounds": [16, 16]}
    job = make_members(BOUNDS=json.dumps(bounds), EPOCHS=8, SHORT="forward", FITS=8)
    (trainer,) = job.start(1)
    job.activate([trainer], wait=False)
    wait_until(lambda: trainer.code is not None, "the program fails", patience=150)
    assert trainer.code == 1
    assert "16 samples does not fit into the memory of cpu, and the bounds allow no" in job.output()
