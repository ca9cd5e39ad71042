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
from torch.optim.lr_scheduler import StepLR
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
@pytest.mark.parametrize(("micro", "clip"), [(1, None), (2, 0.3)])
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
def test_lightning_with_manual_optimization() -> None:
    from worker.adascale_lightning import ManualOptimization, loader, trainer

    micro = 2
    model, data = network(), batches(STEPS * micro)
    reference = reference_of(model)
    program = ManualOptimization(model, micro)
    trainer().fit(program, loader(data))
    assert program.gains == pytest.approx(gains_of(reference, data, micro), rel=1e-9)
    assert_equal_weights(model, reference.model)


@pytest.mark.slow
def test_a_checkpoint_of_lightning_includes_the_estimates(tmp_path: Path) -> None:
    from worker.adascale_lightning import Program, loader, trainer

    micro = 2
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

    def test_it_saves_and_loads(self, model: nn.Module, optimizer: AdaScale, wrapper: Any) -> None:
        self.train(optimizer, model)
        estimate, state = optimizer.estimate, copy.deepcopy(wrapper.state_dict())
        self.train(optimizer, model)
        assert optimizer.estimate != estimate
        wrapper.load_state_dict(state)
        assert optimizer.estimate == wrapper.estimate == estimate
        assert wrapper.param_groups is optimizer.param_groups


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


@pytest.mark.parametrize(("micro", "clip"), [(1, None), (2, 0.3)])
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


def test_a_state_of_accelerate_includes_the_estimates(
    accelerator: Callable[..., Any], tmp_path: Path
) -> None:
    micro = 2
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
