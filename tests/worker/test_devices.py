"""What must hold on each kind of device: on the CPU, and with `make test-gpu` on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from adascale import AdaScale, ElasticTrainer
from adascale_core.checkpoint_manifest import Manifest
from adascale_worker.loop.context import Context
from adascale_worker.loop.failures import Failures
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.program.weight_checks import FiniteWeights
from adascale_worker.state.file import Snapshot
from adascale_worker.state.store import CheckpointStore
from adascale_worker.state.tree import flatten, on_host
from e2e.local_run import adascale, write_job
from support.fast_python import PYTHON
from support.gan import Gan, noise_of
from support.launch import run_python, wait_until
from support.training import ACCUMULATING, FIXED, WAITS, MakeTrainer, network, samples

ROOT = Path(__file__).parents[2]
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(torch.device("cuda", 0), id="cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)
OPTIMIZERS: dict[str, Any] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW, a tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "AdamW, capturable": (torch.optim.AdamW, {"lr": 0.01, "capturable": True}),
}
# torch supports capturable on GPUs only.
with_each_optimizer = pytest.mark.parametrize(
    ("device", "kind"),
    [
        pytest.param(*device.values, kind, id=f"{device.id}, {kind}", marks=device.marks)
        for device in DEVICES
        for kind in OPTIMIZERS
        if kind != "AdamW, capturable" or device.id == "cuda"
    ],
)


def train(
    trainer: ElasticTrainer, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: range = range(2)
) -> list[tuple[Tensor, Tensor]]:
    """Train with clipping, and return the micro-batches."""
    batches = []
    for epoch in epochs:
        for _, x, y in trainer.dataloader(samples()):
            x, y = x.to(trainer.device), y.to(trainer.device)
            learn(model, optimizer, x, y)
            batches.append((x, y))
        trainer.step(epoch)
    return batches


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(map(torch.equal, left.state_dict().values(), right.state_dict().values()))


@with_each_optimizer
def test_at_scale_one_the_weights_are_those_of_a_plain_loop(
    make_trainer: MakeTrainer, device: torch.device, kind: str
) -> None:
    make, options = OPTIMIZERS[kind]
    model = network().to(device)
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = (make(each.parameters(), **copy.deepcopy(options)) for each in (model, twin))
    trainer = make_trainer(**FIXED, device=device)
    trainer.program_reentry(model, optimizer)
    batches = train(trainer, model, optimizer)
    trainer.close()
    for x, y in batches:
        learn(twin, twin_optimizer, x, y)
    assert same(model, twin)


@with_each_optimizer
def test_gains_are_those_of_double_precision_on_the_cpu(device: torch.device, kind: str) -> None:
    make, options = OPTIMIZERS[kind]
    reference_options = {name: value for name, value in options.items() if name != "capturable"}
    reference_options["lr"] = float(options["lr"])
    found = []
    for dtype, where, arguments in (
        (torch.float32, device, copy.deepcopy(options)),
        (torch.float64, torch.device("cpu"), reference_options),
    ):
        model = network().to(where, dtype)
        adascale = AdaScale(
            make(model.parameters(), **arguments), num_gradients_to_accumulate=3, scale=3.0, sample_every=1
        )
        _, features, classes = samples().tensors
        gains = []
        for step in range(5):
            for micro in range(3):
                part = slice(4 * (step + micro), 4 * (step + micro) + 4)
                x, y = features[part].to(where, dtype), classes[part].to(where)
                (nn.functional.cross_entropy(model(x), y) / 3).backward()
            gains.append(adascale.gain())
            adascale.step()
            adascale.zero_grad()
        found.append(gains)
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert max(found[0]) > 1.05


@on_each_device
def test_training_continues_from_a_checkpoint_bit_for_bit(
    make_trainer: MakeTrainer, tmp_path: Path, device: torch.device
) -> None:
    def begin(**options: Any) -> tuple[ElasticTrainer, nn.Module, torch.optim.Optimizer]:
        model = network(dropout=0.3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = make_trainer(**ACCUMULATING, device=device, **options)
        trainer.program_reentry(model, optimizer)
        return trainer, model, optimizer

    trainer, whole, optimizer = begin()
    train(trainer, whole, optimizer, range(4))
    trainer.close()
    saves = {"checkpoint_dir": tmp_path, "epochs": 2}
    trainer, model, optimizer = begin(**saves)
    train(trainer, model, optimizer, range(2))
    trainer.close()
    trainer, model, optimizer = begin(**{**saves, "epochs": 4})
    assert trainer.steps == 8
    train(trainer, model, optimizer, range(2, 4))
    assert same(model, whole)


@on_each_device
def test_two_optimizers_make_the_steps_of_a_plain_loop(
    make_trainer: MakeTrainer, device: torch.device
) -> None:
    gan, plain = Gan(norm=True), Gan(norm=True)
    for each in (gan, plain):
        each.generator.to(device)
        each.discriminator.to(device)
    trainer = make_trainer(**FIXED, device=device)
    gan.enter(trainer)
    batches = []
    for index, x, _ in trainer.dataloader(samples()):
        batch = x.to(device), noise_of(index).to(device)
        gan.learn(*batch)
        batches.append(batch)
    trainer.close()
    for batch in batches:
        plain.learn(*batch)
    assert same(gan.generator, plain.generator)
    assert same(gan.discriminator, plain.discriminator)


@pytest.mark.gpu
def test_most_steps_of_a_trainer_do_not_wait_for_the_gpu(make_trainer: MakeTrainer) -> None:
    """A measured step waits once. The data are on the GPU, because a copy from the host waits too."""
    device, steps = torch.device("cuda", 0), 64
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = make_trainer(batch_size=8, device=device)
    trainer.program_reentry(model, optimizer)
    data = TensorDataset(
        torch.randn(2000, 6, device=device), torch.zeros(2000, dtype=torch.long, device=device)
    )
    batches = iter(trainer.dataloader(data))
    for _ in range(110):  # The first 100 steps are all measured.
        learn(model, optimizer, *next(batches))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(steps):
            learn(model, optimizer, *next(batches))
    waits = [event.name for event in profiled.events() if event.name in WAITS]
    assert len(waits) <= steps // 4, waits


class Memory(nn.Module):
    """Memory of the device for 4 samples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            torch.empty(1 << 60, dtype=torch.uint8, device=x.device)
        return x


@on_each_device
def test_a_batch_that_does_not_fit_follows_in_smaller_batches(
    make_trainer: MakeTrainer, device: torch.device
) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), Memory(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = make_trainer(batch_size=12, device=device)
    trainer.program_reentry(model, optimizer)
    sizes = [len(x) for x, _ in train(trainer, model, optimizer, range(1))]
    assert sizes == [12, 6, *[3] * 16]
    assert trainer.steps == 4


@on_each_device
def test_a_snapshot_is_a_copy_in_memory_that_the_device_can_write_to(device: torch.device) -> None:
    tensors = [torch.randn(5, 3, device=device), torch.arange(4, device=device)]
    snapshot = Snapshot()
    snapshot.copy({"tensors": tensors}, weights=tensors[:1])
    expected = tensors[0].cpu().clone()
    tensors[0].zero_()
    assert torch.equal(snapshot.weights[0], expected)
    assert snapshot._memory.is_pinned() == (device.type == "cuda")


@on_each_device
def test_a_snapshot_has_the_state_from_before_what_follows_it(device: torch.device) -> None:
    """The program changes its tensors at once, and the optimizer changes its own in the next step."""
    weight, moment = torch.randn(1 << 24, device=device), torch.randn(1 << 24, device=device)
    snapshot, expected = Snapshot(), torch.cat([weight, moment]).cpu()
    for _ in range(3):
        snapshot.copy({"weight": weight, "moment": moment}, changed_by_step=[moment])
        kept = weight.clone(), moment.clone()
        weight.zero_()
        snapshot.before_step()
        moment.zero_()
        content = torch.frombuffer(bytearray(b"".join(snapshot.parts(1 << 24))), dtype=torch.float32)
        assert torch.equal(content, expected)
        weight, moment = kept


@on_each_device
def test_a_snapshot_keeps_what_the_program_deletes(device: torch.device) -> None:
    snapshot, moment = Snapshot(), torch.randn(1 << 24, device=device)
    expected = moment.cpu().clone()
    snapshot.copy({"moment": moment}, changed_by_step=[moment])
    del moment
    # On a GPU, this would be given the memory of the deleted tensor.
    torch.zeros(1 << 24, device=device)
    content = torch.frombuffer(bytearray(b"".join(snapshot.parts(1 << 26))), dtype=torch.float32)
    assert torch.equal(content, expected)


@on_each_device
def test_a_tree_is_copied_to_the_host(device: torch.device) -> None:
    rows = torch.arange(6.0, device=device).view(2, 3).T
    found = on_host({"rows": rows, "best": (torch.ones((), device=device), 3)})
    assert {tensor.device.type for tensor in flatten(found)[1]} == {"cpu"}
    assert torch.equal(found["rows"], rows.cpu())
    assert found["best"] == (1.0, 3)


@pytest.mark.gpu
def test_neither_a_snapshot_nor_the_next_step_waits_for_the_gpu() -> None:
    device = torch.device("cuda", 0)
    matrix, moment = torch.randn(4096, 4096, device=device), torch.randn(1 << 24, device=device)
    snapshot = Snapshot()
    snapshot.copy({"matrix": matrix, "moment": moment})  # allocates its memory
    snapshot.wait()
    torch.mm(matrix, matrix).sin_().zero_()  # To load a kernel waits for all others.
    for _ in range(200):
        matrix = torch.mm(matrix, matrix).sin_()
    done = torch.cuda.Event()
    done.record()
    snapshot.copy({"matrix": matrix, "moment": moment}, changed_by_step=[moment])
    snapshot.before_step()
    moment.zero_()
    assert not done.query(), "the GPU works for a second"
    snapshot.wait()
    assert done.query()


@on_each_device
@pytest.mark.parametrize("kind", ["SGD", "AdamW, fused"])
def test_a_checkpoint_that_is_written_beside_training_is_of_its_step(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    kind: str,
) -> None:
    saved: dict[int, dict[str, Any]] = {}
    save = CheckpointStore.save

    def save_and_load(store: CheckpointStore, *arguments: Any) -> Manifest:
        manifest = save(store, *arguments)
        loaded = store.load(manifest.number)
        assert loaded is not None
        saved[manifest.step] = loaded[0]["program"]
        return manifest

    monkeypatch.setattr(CheckpointStore, "save", save_and_load)
    make, options = OPTIMIZERS[kind]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 2)).to(device)
    optimizer = make(model.parameters(), **options)
    trainer = make_trainer(**FIXED, device=device, checkpoint_dir=tmp_path, checkpoint_interval=1e-6)
    trainer.program_reentry(model, optimizer)
    checkpointing = trainer._replica.checkpointing
    expected: dict[int, list[Tensor]] = {}
    for epoch in range(4):
        for _, x, y in trainer.dataloader(samples()):
            learn(model, optimizer, x.to(device), y.to(device))
            expected[trainer.steps] = flattened([model.state_dict(), optimizer.state_dict()["state"]])
            # The checkpoint of the step before, so that the next one is due.
            wait_until(lambda: not checkpointing.is_busy, "the end of a checkpoint")
        trainer.step(epoch)
    trainer.close()
    # Where a gradient is kept for the next step, none is saved.
    assert len(saved) >= len(expected) // 2
    for step, program in saved.items():
        found = flattened([program["model"], program["optimizer"]["state"]])
        assert all(map(torch.equal, found, expected[step])), f"the checkpoint of step {step}"


def flattened(tree: Any) -> list[Tensor]:
    """Copies of the tensors of a tree, on the host."""
    return [tensor.cpu().clone() for tensor in flatten(tree)[1]]


@pytest.mark.gpu
def test_the_state_can_be_saved_while_a_kernel_does_not_end() -> None:
    device = torch.device("cuda", 0)
    group = ReplicaGroup(RankAssignment(0, 2), device, is_elastic=True)
    weight = nn.Parameter(torch.randn(1 << 20, device=device))
    expected, snapshot, done = weight.detach().cpu(), Snapshot(), torch.cuda.Event()
    finite = FiniteWeights(torch.optim.SGD([weight]), 3, group)
    torch.cuda._sleep(1 << 33)  # some seconds
    done.record()

    def save() -> bool:
        snapshot.copy({"weight": weight.detach()}, weights=[weight.detach()])
        return finite.are_finite() and torch.equal(snapshot.weights[0], expected)

    parts = SimpleNamespace(group=group, device=device, state=SimpleNamespace(save_beside=save))
    assert Failures(cast(Context, parts))._save_beside()
    assert not done.query()
    torch.cuda.synchronize(device)


@pytest.mark.gpu
def test_two_replicas_share_a_gpu(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU; they join, train and leave with gloo."""
    job = write_job(
        tmp_path / "job.yaml",
        [*PYTHON, str(ROOT / "examples" / "digits.py")],
        {"CUDA_VISIBLE_DEVICES": "0"},
        minReplicas=2,
        maxReplicas=2,
        batchSize=4,
        maxBatchSize=64,
        localBszBounds={"lower": 4, "upper": 32},
        scaleInvariantSteps=2000,
    )
    run = adascale("run", job, "--state-dir", tmp_path / "state", "--port", 0, timeout=300)
    assert run.returncode == 0, run.stdout
    assert "Finished at progress" in run.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("example", ["cnn", "gan"])
def test_an_example_trains_on_a_gpu(tmp_path: Path, example: str) -> None:
    """On the CPU, `e2e/test_examples.py` trains it."""
    options = {"ADASCALE_SCALE_INVARIANT_STEPS": 200, "ADASCALE_CHECKPOINT_DIR": tmp_path}
    assert "after 2" in run_python(ROOT / "examples" / f"{example}.py", **options)
