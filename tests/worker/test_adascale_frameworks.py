"""AdaScale in Lightning's Trainer and Hugging Face's Accelerate, compared with `worker.reference`.

Both are imported where they are used, because that takes seconds. The tests with Lightning are marked slow
for that reason.
"""

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from adascale_worker.adascale import AdaScale
from worker.adascale_problem import backward, batches, network, squared_error
from worker.adascale_ranks import run_cases
from worker.reference import Batch, Reference

if TYPE_CHECKING:
    from accelerate import Accelerator

# Lightning uses an interface of PyTorch's trees that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

STEPS = 12


def reference_of(model: nn.Module, scale: float = 4.0, **options: Any) -> Reference:
    model = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Reference(model, sgd, options.pop("loss", squared_error), scale, **options)


def steps_of(data: list[Batch], micro: int) -> Iterator[list[Batch]]:
    return (data[start : start + micro] for start in range(0, len(data), micro))


def gains_of(
    reference: Reference, data: list[Batch], micro: int, after: Callable[[], None] | None = None
) -> list[float]:
    """Train the reference; call `after` each step."""
    gains = []
    for step in steps_of(data, micro):
        reference.step(step)
        gains.append(reference.gain())
        if after is not None:
            after()
    return gains


def assert_equal_weights(model: nn.Module, reference: nn.Module, tolerance: float = 1e-9) -> None:
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=tolerance, atol=tolerance / 1000)


# -- Lightning ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_lightning(*, micro: int, clip: float | None) -> None:
    from worker.adascale_lightning import Program, loader, trainer

    model, data = network(), batches(STEPS * micro)
    reference = reference_of(model, clip=clip)
    program = Program(model)
    trainer(accumulate_grad_batches=micro, gradient_clip_val=clip).fit(program, loader(data))
    assert program.gains == pytest.approx(gains_of(reference, data, micro), rel=1e-9)
    assert len(program.gains) == STEPS
    assert_equal_weights(model, reference.model)


@pytest.mark.slow
def test_lightning_advances_a_scheduler_by_steps() -> None:
    from worker.adascale_lightning import Options, Program, loader, trainer

    model, data = network(), batches(STEPS * 2)
    reference = reference_of(model)
    program = Program(model, Options(scheduler=lambda o: StepLR(o, step_size=3, gamma=0.5)))
    trainer(accumulate_grad_batches=2).fit(program, loader(data))
    gains_of(reference, data, 2, after=StepLR(reference.sgd, step_size=3, gamma=0.5).step)
    assert program.rates == [0.05 * 0.5 ** (step // 3) for step in range(STEPS)]
    assert_equal_weights(model, reference.model)


@pytest.mark.slow
def test_lightning_advances_a_scheduler_by_progress() -> None:
    from worker.adascale_lightning import Options, Program, loader, trainer

    model, data = network(), batches(STEPS * 2)
    reference = reference_of(model)
    program = Program(model, Options(scheduler=lambda o: CosineAnnealingLR(o, T_max=50), by_progress=True))
    trainer(accumulate_grad_batches=2).fit(program, loader(data))
    schedule = CosineAnnealingLR(reference.sgd, T_max=50)
    progress = 0.0

    def advance() -> None:
        nonlocal progress
        progress += reference.gain()
        while schedule.last_epoch < int(progress):
            schedule.step()

    gains_of(reference, data, 2, after=advance)
    assert program.progress == pytest.approx(progress, rel=1e-9)
    assert schedule.last_epoch > STEPS
    assert_equal_weights(model, reference.model)


@pytest.mark.slow
def test_lightning_stops_when_the_progress_is_reached() -> None:
    from worker.adascale_lightning import Options, Program, loader, trainer

    program = Program(network(), Options(max_progress=20.0))
    trainer(accumulate_grad_batches=2, max_epochs=-1).fit(program, loader(batches(6)))
    assert program.progress >= 20.0
    assert sum(program.gains[:-1]) < 20.0


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
def test_lightning_with_manual_optimization(micro: int) -> None:
    from worker.adascale_lightning import ManualOptimization, Options, loader, trainer

    model, data = network(), batches(STEPS * micro)
    reference = reference_of(model)
    program = ManualOptimization(model, micro, Options({"num_gradients_to_accumulate": micro}))
    trainer().fit(program, loader(data))
    assert program.gains == pytest.approx(gains_of(reference, data, micro), rel=1e-9)
    assert_equal_weights(model, reference.model)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
def test_lightning_in_mixed_precision(micro: int) -> None:
    from worker.adascale_lightning import Program, loader, trainer

    def autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squared_error(model, batch)

    model = network().float()
    data = [(x.float(), y.float()) for x, y in batches(STEPS * micro)]
    reference = reference_of(model, loss=autocast)
    program = Program(model)
    trainer(accumulate_grad_batches=micro, precision="bf16-mixed").fit(program, loader(data))
    assert program.gains == pytest.approx(gains_of(reference, data, micro), rel=1e-4)
    assert_equal_weights(model, reference.model, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
def test_a_checkpoint_of_lightning_includes_the_estimates(*, micro: int, tmp_path: Path) -> None:
    from worker.adascale_lightning import Program, loader, trainer

    model, data = network(), batches(STEPS // 2 * micro)
    reference = reference_of(model)
    first = Program(model)
    before = trainer(accumulate_grad_batches=micro)
    before.fit(first, loader(data))
    before.save_checkpoint(tmp_path / "checkpoint")

    second = Program(network(seed=5))
    after = trainer(accumulate_grad_batches=micro, max_epochs=2)
    after.fit(second, loader(data), ckpt_path=tmp_path / "checkpoint", weights_only=True)
    assert first.gains + second.gains == pytest.approx(gains_of(reference, data * 2, micro), rel=1e-9)
    assert_equal_weights(second.network, reference.model)


@pytest.mark.slow
def test_lightning_trains_two_networks_alternately() -> None:
    from worker.adascale_lightning import TwoNetworks, loader, trainer

    networks: list[nn.Module] = [network(seed=0), network(seed=5)]
    references, data = [reference_of(network_) for network_ in networks], batches(STEPS)
    program = TwoNetworks(networks)
    trainer().fit(program, loader(data))
    for model, gains, reference in zip(networks, program.gains, references, strict=True):
        assert gains == pytest.approx(gains_of(reference, data, 1), rel=1e-9)
        assert_equal_weights(model, reference.model)


@pytest.mark.slow
class TestLightningsOptimizer:
    """The result of `LightningModule.optimizers()`: a wrapper with AdaScale's class and without its state."""

    @pytest.fixture
    def model(self) -> nn.Module:
        return network()

    @pytest.fixture
    def optimizer(self, model: nn.Module) -> AdaScale:
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return AdaScale(sgd, num_gradients_to_accumulate=2, is_scaled_loss=False)

    @pytest.fixture
    def wrapper(self, optimizer: AdaScale) -> Any:
        from pytorch_lightning.core.optimizer import LightningOptimizer

        wrapper = LightningOptimizer(optimizer)
        assert isinstance(wrapper, AdaScale)
        return wrapper

    def train(self, optimizer: AdaScale, model: nn.Module) -> None:
        for batch in batches(2):
            backward(squared_error(model, batch))
        optimizer.step()

    def test_it_sets_the_scale(self, optimizer: AdaScale, wrapper: Any) -> None:
        wrapper.set_scale(8.0)
        assert (optimizer.scale, wrapper.scale) == (8.0, 8.0)
        optimizer.set_scale(2.0)
        assert wrapper.scale == 2.0

    def test_it_sets_the_number_of_gradients(
        self, model: nn.Module, optimizer: AdaScale, wrapper: Any
    ) -> None:
        wrapper.set_num_gradients_to_accumulate(1)
        wrapper.set_num_gradients_to_accumulate(2)
        self.train(optimizer, model)
        assert optimizer.estimate is not None
        assert wrapper.estimate == optimizer.estimate
        assert wrapper.gain() == optimizer.gain()
        assert wrapper.predict_gain(9.0) == optimizer.predict_gain(9.0)

    def test_it_divides_gradients_once(self, model: nn.Module, optimizer: AdaScale, wrapper: Any) -> None:
        for batch in batches(2):
            backward(squared_error(model, batch))
        sums = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        wrapper.scale_grad_by_num_grads_to_accum()
        optimizer.step()
        for gradient, parameter in zip(sums, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, gradient / 2)
        wrapper.zero_grad()
        self.train(optimizer, model)
        assert wrapper.estimate == optimizer.estimate

    def test_it_saves_and_loads(self, model: nn.Module, optimizer: AdaScale, wrapper: Any) -> None:
        self.train(optimizer, model)
        estimate, state = optimizer.estimate, copy.deepcopy(wrapper.state_dict())
        self.train(optimizer, model)
        assert optimizer.estimate != estimate
        wrapper.load_state_dict(state)
        assert optimizer.estimate == wrapper.estimate == estimate
        assert wrapper.param_groups is optimizer.param_groups

    def test_it_adds_a_parameter_group(self, optimizer: AdaScale, wrapper: Any) -> None:
        wrapper.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
        assert len(optimizer.param_groups) == len(wrapper.param_groups) == 2
        assert wrapper.gain(1) == 1.0

    def test_it_removes_the_hooks(self, model: nn.Module, optimizer: AdaScale, wrapper: Any) -> None:
        wrapper.unhook()
        self.train(optimizer, model)
        self.train(optimizer, model)
        assert optimizer.estimate is None


# -- Accelerate --------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Callable[..., "Accelerator"]]:
    """Makes an Accelerator; its state of the process is deleted before and afterwards."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    def make(micro: int = 1) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, gradient_accumulation_steps=micro)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def loader_of(data: list[Batch]) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(*(torch.cat(part) for part in zip(*data, strict=True))), batch_size=4)


def accelerated(trained: nn.Module, micro: int, scale: float | None = 4.0, **adascale: Any) -> AdaScale:
    sgd = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    return AdaScale(sgd, scale=scale, num_gradients_to_accumulate=micro, **adascale)


def train(
    accelerator: "Accelerator",
    prepared: tuple[Any, ...],
    adascale: AdaScale,
    clip: float | None = None,
) -> list[float]:
    """The loop of docs/adascale.md; returns the gain of each step."""
    model, optimizer, loader, scheduler = prepared
    gains = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(squared_error(model, batch))
            if accelerator.sync_gradients:
                gains.append(adascale.gain())
                if clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return gains


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_accelerate(*, accelerator: Callable[..., Any], micro: int, clip: float | None) -> None:
    model, data = network(), batches(STEPS * micro)
    reference = reference_of(model, clip=clip)
    adascale = accelerated(model, micro)
    scheduler = StepLR(adascale, step_size=3, gamma=0.5)
    instance = accelerator(micro)
    prepared = instance.prepare(model, adascale, loader_of(data), scheduler)
    gains = train(instance, prepared, adascale, clip)
    assert len(gains) == STEPS
    assert gains == pytest.approx(
        gains_of(reference, data, micro, after=StepLR(reference.sgd, step_size=3, gamma=0.5).step), rel=1e-9
    )
    assert adascale.param_groups[0]["lr"] == reference.sgd.param_groups[0]["lr"]
    assert_equal_weights(model, reference.model)


def test_accelerate_with_a_scheduler_by_progress(accelerator: Callable[..., Any]) -> None:
    model, data = network(), batches(STEPS * 2)
    reference, instance = reference_of(model), accelerator(2)
    adascale = accelerated(model, 2)
    scheduler, schedule = CosineAnnealingLR(adascale, T_max=50), CosineAnnealingLR(reference.sgd, T_max=50)
    prepared, optimizer, loader = instance.prepare(model, adascale, loader_of(data))
    progress = reference_progress = 0.0
    for batch in loader:
        with instance.accumulate(prepared):
            instance.backward(squared_error(prepared, batch))
            if instance.sync_gradients:
                progress += adascale.gain()
            optimizer.step()
            optimizer.zero_grad()
        while scheduler.last_epoch < int(progress):
            scheduler.step()

    def advance() -> None:
        nonlocal reference_progress
        reference_progress += reference.gain()
        while schedule.last_epoch < int(reference_progress):
            schedule.step()

    gains_of(reference, data, 2, after=advance)
    assert progress == pytest.approx(reference_progress, rel=1e-9)
    assert scheduler.last_epoch > STEPS
    assert_equal_weights(model, reference.model)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_accelerate_with_a_loss_scale(
    *, accelerator: Callable[..., Any], micro: int, clip: float | None
) -> None:
    model, data = network(), batches(STEPS * micro)
    reference = reference_of(model, clip=clip)
    instance = accelerator(micro)
    # Accelerate itself makes a scaler only with mixed_precision="fp16", and only on GPUs.
    instance.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    adascale = accelerated(model, micro, grad_scaler=instance.scaler)
    prepared = instance.prepare(model, adascale, loader_of(data), StepLR(adascale, step_size=99))
    instance.native_amp, instance.state._mixed_precision = True, "fp16"
    gains = train(instance, prepared, adascale, clip)
    assert not prepared[1].step_was_skipped
    assert gains == pytest.approx(gains_of(reference, data, micro), rel=1e-9)
    assert_equal_weights(model, reference.model)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_state_of_accelerate_includes_the_estimates(
    *, accelerator: Callable[..., Any], micro: int, tmp_path: Path
) -> None:
    data = batches(STEPS // 2 * micro)
    gains: list[float] = []
    reference = reference_of(network())
    for seed in (0, 5):  # the model of seed 5 loads the state of the model of seed 0
        model = network(seed)
        adascale = accelerated(model, micro)
        instance = accelerator(micro)
        scheduler = StepLR(adascale, step_size=4, gamma=0.5)
        prepared = instance.prepare(model, adascale, loader_of(data), scheduler)
        if gains:
            instance.load_state(str(tmp_path / "state"))
        gains += train(instance, prepared, adascale)
        instance.save_state(str(tmp_path / "state"))
    schedule = StepLR(reference.sgd, step_size=4, gamma=0.5)
    assert gains == pytest.approx(gains_of(reference, data * 2, micro, after=schedule.step), rel=1e-9)
    assert_equal_weights(model, reference.model)


# -- two ranks ---------------------------------------------------------------------------------------------


def _accelerate_on_two_ranks(*, micro: int, give_model: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    rank = str(dist.get_rank())  # as `accelerate launch` sets them; the process group exists already
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ["OMP_NUM_THREADS"] = "1"
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
    model, data = network(), batches(STEPS * micro * 2)
    reference = reference_of(model, scale=2.0 * micro)
    if give_model:
        ddp = accelerator.prepare(model)
        adascale = accelerated(model, micro, scale=None, model=ddp)
    else:
        adascale = accelerated(model, micro, scale=None)
        ddp = accelerator.prepare(model)
    assert isinstance(ddp, DistributedDataParallel)
    assert adascale.scale == 2.0 * micro
    optimizer, loader, scheduler = accelerator.prepare(
        adascale, loader_of(data), StepLR(adascale, step_size=999)
    )
    gains = train(accelerator, (ddp, optimizer, loader, scheduler), adascale)
    assert gains == pytest.approx(gains_of(reference, data, 2 * micro), rel=1e-9)
    assert_equal_weights(model, reference.model)
    assert scheduler.scheduler.last_epoch == 2 * STEPS  # Accelerate makes a step for each rank


RANKS: dict[str, Callable[[], None]] = {
    f"micro={micro} give_model={give_model}": partial(
        _accelerate_on_two_ranks, micro=micro, give_model=give_model
    )
    for micro in (1, 2)
    for give_model in (False, True)
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases("worker.test_adascale_frameworks", "RANKS", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.timeout(300)  # each rank imports Accelerate
@pytest.mark.parametrize("name", RANKS)
def test_accelerate_on_two_ranks(name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[name], "\n".join(failures[name])
