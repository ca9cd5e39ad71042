"""`ElasticAccelerator` on one replica, compared with Accelerate's `Accelerator`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from adascale.accelerate import ElasticAccelerator
from adascale.errors import DatasetError, InvalidJobError, WorkerError
from adascale_core.errors import MissingExtraError
from support.streams import Items
from support.training import adamw, equal, network, parameters_of, samples, sgd

Make = Callable[..., Any]


def forget_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def make(no_job: None) -> Iterator[Make]:
    """Makes accelerators, each as the first one of its process."""
    made: list[Any] = []

    def make(kind: Callable[..., Any] = ElasticAccelerator, **options: Any) -> Any:
        forget_state()
        if kind is ElasticAccelerator:
            options = {"batch_size": 8, **options}
        made.append(kind(**options))
        return made[-1]

    yield make
    for accelerator in reversed(made):
        if isinstance(accelerator, ElasticAccelerator):
            accelerator.trainer.close()
    forget_state()


def loader(batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=batch_size, **options)


def prepared(accelerator: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = network()
    return tuple(accelerator.prepare(model, sgd(model), loader(**options)))


def train(accelerator: Any, make_optimizer: Any, *, epochs: int = 2, **options: Any) -> tuple[Any, list[Any]]:
    """Train as a program of Accelerate does, and return the model, and a record of each batch."""
    model: Any = network()
    optimizer = make_optimizer(model)
    batches: Any = loader(**options)
    scheduler = CosineAnnealingLR(optimizer, epochs * len(batches) // accelerator.gradient_accumulation_steps)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    records = []
    is_elastic = isinstance(accelerator, ElasticAccelerator)
    for _ in accelerator.epochs(epochs) if is_elastic else range(epochs):
        model.train()
        for index, x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            records.append((index.tolist(), accelerator.sync_gradients, scheduler.get_last_lr()))
    return model, records


@pytest.mark.parametrize(("make_optimizer", "precision"), [(sgd, "bf16"), (adamw, "no")])
def test_weights_are_those_of_the_plain_framework_bit_for_bit(
    make: Make, make_optimizer: Any, precision: str
) -> None:
    plain = train(make(accelerate.Accelerator, cpu=True, mixed_precision=precision), make_optimizer)
    elastic = train(make(mixed_precision=precision), make_optimizer)
    assert equal(parameters_of(elastic[0]), parameters_of(plain[0]))
    assert elastic[1] == plain[1]


def test_batches_that_are_requested_together_are_refused_and_several_losses_are_not(make: Make) -> None:
    """Backward passes for the batches before would count as those of the last one."""

    def train_one(accelerator: Any, taken: int, losses: int) -> None:
        model, optimizer, batches = prepared(accelerator)
        for _ in accelerator.epochs(1):
            iterator = iter(batches)
            while parts := list(islice(iterator, taken)):
                for _, x, y in parts[-1:] if losses > 1 else parts:
                    for _ in range(losses):
                        accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    train_one(make(), 1, 2)
    with pytest.raises(WorkerError, match=r"backward\(\) was called 3 times .* after 2 batches .*weighted"):
        train_one(make(), 3, 1)


def test_the_data_may_be_a_stream(make: Make) -> None:
    def trained(accelerator: Any, epochs: Any) -> Any:
        model: Any = network()
        model, optimizer, batches = accelerator.prepare(model, sgd(model), DataLoader(Items(samples()), 8))
        seen = []
        for _ in epochs(2):
            for index, x, y in batches:
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                seen.extend(index.tolist())
        return model, seen, batches

    plain, _, _ = trained(make(accelerate.Accelerator, cpu=True), range)
    accelerator = make()
    model, seen, batches = trained(accelerator, accelerator.epochs)
    assert equal(parameters_of(model), parameters_of(plain))
    assert seen == [*range(48)] * 2
    model.eval()
    with pytest.raises(DatasetError, match=r"evaluation mode.* __len__"):
        next(iter(batches))
    shuffled = make(shuffle_buffer=20)
    _, seen, _ = trained(shuffled, shuffled.epochs)
    assert sorted(seen[:48]) == sorted(seen[48:]) == [*range(48)] != seen[:48] != seen[48:]


def test_a_model_that_accelerate_compiles_is_trained(make: Make) -> None:
    plain, _ = train(make(accelerate.Accelerator, cpu=True), sgd)
    model, _ = train(make(dynamo_backend="eager"), sgd)
    assert isinstance(model, torch._dynamo.OptimizedModule)
    for found, expected in zip(parameters_of(model), parameters_of(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_accumulation_is_that_of_the_trainer_and_gives_the_weights_of_whole_batches(make: Make) -> None:
    plain, _ = train(make(accelerate.Accelerator, cpu=True, gradient_accumulation_steps=2), sgd, batch_size=4)
    elastic = make(gradient_accumulation_steps=2, local_bsz_bounds=(2, 2))
    model, records = train(elastic, sgd, batch_size=4)
    assert [len(index) for index, _, _ in records] == [2] * 48
    assert [complete for _, complete, _ in records] == [False, False, False, True] * 12
    for found, expected in zip(parameters_of(model), parameters_of(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert records[-1][2] == pytest.approx([0.0])


def test_divided_steps_are_those_of_whole_batches(make: Make) -> None:
    """On one replica, some steps are divided to measure the gain."""
    plain, expected = train(make(accelerate.Accelerator, cpu=True), sgd, epochs=3)
    elastic = make(max_batch_size=32, local_bsz_bounds=(8, 8))
    model, records = train(elastic, sgd, epochs=3)
    assert {len(index) for index, _, _ in records} == {4, 8}
    assert [lr for _, complete, lr in records if complete] == [lr for _, _, lr in expected]
    assert [n for index, _, _ in records for n in index] == [n for index, _, _ in expected for n in index]
    for found, other in zip(parameters_of(model), parameters_of(plain), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-6)


def test_evaluation_batches_are_those_of_the_data_set_and_train_nothing(make: Make) -> None:
    accelerator = make()
    model, optimizer, batches = prepared(accelerator)
    held_out = accelerator.prepare_data_loader(loader(batch_size=20))
    for _ in accelerator.epochs(1):
        for number, (_, x, y) in enumerate(batches):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            model.eval()  # evaluates in the middle of an epoch
            found: list[int] = []
            for index, _, _ in held_out:
                gathered, names = (
                    accelerator.gather_for_metrics(index),
                    accelerator.gather_for_metrics([{"index": str(int(n))} for n in index]),
                )
                assert [each["index"] for each in names] == [str(int(n)) for n in gathered]
                assert accelerator.reduce(index.sum()) == index.sum()
                assert accelerator.pad_across_processes(index).shape == index.shape
                assert accelerator.gather(index.sum()).shape == (1,)
                found += gathered.tolist()
            assert found == list(range(48))
            model.train()
            assert accelerator.sync_gradients
            assert accelerator.trainer.steps == number + 1


def test_the_main_process_prints_logs_and_counts_by_progress(
    make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Recorder(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "recorder", False, None
        logged: list[Any] = []  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.logged.append(values)

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            self.logged.append((values, step))

        def finish(self) -> None:
            self.logged.append("finished")

    recorder = Recorder()
    accelerator = make(log_with=recorder)
    accelerator.init_trackers("digits", {"lr": 0.1})
    model, optimizer, batches = prepared(accelerator)
    assert len(batches) == 6
    for _ in accelerator.epochs(1):
        for _, x, y in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 2.0}, step=3)
    assert accelerator.get_tracker("recorder") is recorder
    accelerator.end_training()
    assert recorder.logged == [{"lr": 0.1}, ({"loss": 1.0}, 6), ({"loss": 2.0}, 3), "finished"]
    accelerator.print("only here")
    assert capsys.readouterr().out == "only here\n"
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        pass
    assert accelerator.unwrap_model(model) is model


def test_save_state_writes_what_the_plain_framework_loads(make: Make, tmp_path: Path) -> None:
    accelerator = make(
        project_config=accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    )
    average = torch.optim.swa_utils.AveragedModel(network())
    accelerator.register_for_checkpointing(average)
    model, _ = train(accelerator, sgd)
    accelerator.save_state()
    accelerator.project_configuration.iteration = 0  # a job that makes some steps again after a restart
    accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_0"]
    expected = parameters_of(model)
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert equal(parameters_of(model), expected)

    plain = make(accelerate.Accelerator, cpu=True)
    other = network()
    plain.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(network()))
    optimizer = sgd(other)
    plain.prepare(other, optimizer, CosineAnnealingLR(optimizer, 12))
    plain.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert equal(parameters_of(other), expected)


class Epochs:
    """Counts epochs in an object that the program registers."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ended = list(state["ended"])


def test_a_program_resumes_in_its_epoch_with_what_it_has_registered(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs: list[tuple[int, int]] = []

    def run(stop_at: int | None) -> Epochs:
        accelerator = make(checkpoint_dir=tmp_path, checkpoint_interval=0.0)
        model, optimizer, batches = prepared(accelerator)
        counted = Epochs()
        accelerator.register_for_checkpointing(counted, optimizer)
        if stop_at is None:
            accelerator.load_state("nowhere")
        for epoch in accelerator.epochs(3):
            for _, x, y in batches:
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                epochs.append((epoch, accelerator.trainer.steps))
                if accelerator.trainer.steps == stop_at:
                    accelerator.trainer.close()
                    return counted
            counted.ended.append(epoch)
        return counted

    run(stop_at=9)
    finished = run(stop_at=None)
    assert "accelerator.load_state() has loaded nothing" in capsys.readouterr().out
    assert epochs[:9] == [(number // 6, number + 1) for number in range(9)]
    resumed = epochs[9:]
    # The last checkpoint that was written, in the background.
    assert 1 < resumed[0][1] <= 10
    assert resumed == [((step - 1) // 6, step) for step in range(resumed[0][1], 19)]
    assert finished.ended == [0, 1, 2]


def test_several_models_and_optimizers_are_passed_by_name(make: Make) -> None:
    accelerator = make()
    models = [network(), network()]
    optimizers = [sgd(model) for model in models]
    scheduler = CosineAnnealingLR(optimizers[1], 12)
    teacher = network()
    first, second, batches = accelerator.prepare(*models, loader())
    accelerator.prepare(*optimizers, scheduler, teacher)
    for _ in accelerator.epochs(2):
        for _, x, y in batches:
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
            scheduler.step()
    assert accelerator.trainer.steps == 12
    assert optimizers[0].param_groups[0]["lr"] == 0.1
    assert optimizers[1].param_groups[0]["lr"] == pytest.approx(0)


def test_steps_go_through_the_grad_scaler_which_is_saved(make: Make) -> None:
    accelerator = make(local_bsz_bounds=(4, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    accelerator.scaler = scaler  # Accelerate makes one on GPUs only
    model, optimizer, batches = prepared(accelerator)
    skipped = []
    before = parameters_of(model)
    for _ in accelerator.epochs(1):
        for number, (_, x, y) in enumerate(batches):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss * float("inf") if number == 1 else loss)
            optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            if number == 1:
                assert equal(parameters_of(model), before)
                assert not accelerator.sync_gradients
            optimizer.zero_grad()
    assert [number for number, was in enumerate(skipped) if was] == [1]
    assert accelerator.trainer.steps == 6
    assert scaler.get_scale() == 64.0, "halved once, doubled once"


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            lambda: DataLoader(samples(), batch_sampler=[[0, 1]]),
            r"batch_sampler=list\(\.\.\.\) or batch_size=None",
        ),
        (lambda: loader(sampler=SubsetRandomSampler(range(8))), r"sampler=SubsetRandomSampler\(\.\.\.\)"),
        (
            lambda: loader(sampler=DistributedSampler(samples(), 2, 0)),
            "no DistributedSampler is needed",
        ),
    ],
)
def test_a_loader_whose_order_the_trainer_does_not_have_is_refused(
    make: Make, batches: Callable[[], Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        make().prepare(batches())


def test_a_weighted_sampler_keeps_its_weights(make: Make) -> None:
    accelerator = make()
    weights = [float(number % 2) for number in range(48)]
    model, optimizer, batches = prepared(accelerator, sampler=WeightedRandomSampler(weights, 48))
    seen: set[int] = set()
    for _ in accelerator.epochs(1):
        for index, x, y in batches:
            seen.update(index.tolist())
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert seen
    assert all(number % 2 for number in seen)
    model.eval()
    with pytest.raises(WorkerError, match="WeightedRandomSampler cannot be used for evaluation"):
        next(iter(batches))


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (
            {"fsdp_plugin": FullyShardedDataParallelPlugin},
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "got FSDP and DeepSpeed: use one of them",
        ),
        (
            {},
            {"ACCELERATE_USE_MEGATRON_LM": "true"},
            "ACCELERATE_USE_MEGATRON_LM='true' is not supported by ElasticAccelerator: the processes",
        ),
        ({"mixed_precision": "fp8"}, {}, "use 'bf16' or 'fp16'"),
        ({"rng_types": ["torch"]}, {}, "rng_types=.* Leave it out"),
        (
            {"kwargs_handlers": lambda: [DistributedDataParallelKwargs(comm_hook="fp16")]},
            {},
            "comm_hook='fp16' is not supported",
        ),
        # As the trainer refuses them.
        ({"single_replica_gain": "never"}, {}, r"single_replica_gain must be .*, got 'never'"),
        ({"max_gain": 0}, {}, "max_gain must be a finite number above 1, got 0"),
    ],
)
def test_an_option_that_is_not_supported_is_refused(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    environ: dict[str, str],
    message: str,
) -> None:
    forget_state()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    values = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises((WorkerError, InvalidJobError), match=message):
        make(**values)


def test_a_second_accelerator_is_refused(make: Make) -> None:
    make()
    with pytest.raises(WorkerError, match="an Accelerator was made before ElasticAccelerator"):
        ElasticAccelerator(batch_size=8)


Loop = Callable[[Any, Any, Any, Any], None]


def range_loop(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    for _ in range(1):
        for _ in batches:
            pass


def backward_in_evaluation(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    model.eval()
    for _ in accelerator.epochs(1):
        for _, x, y in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))


def late_registration(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    for _ in accelerator.epochs(1):
        accelerator.register_for_checkpointing(Epochs())


def hook_of_load_state(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    accelerator.register_load_state_pre_hook(lambda models, folder: None)


def late_prepare(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    for _ in accelerator.epochs(1):
        accelerator.prepare(network())


def load_in_a_new_job(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    accelerator.load_state("folder")


def save_before(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    accelerator.save_state("folder")


def skip_batches(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    assert accelerator.skip_first_batches(batches) is batches
    accelerator.skip_first_batches(batches, 3)


def remove_wrapper(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)


def no_optimizer(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> None:
    accelerator._optimizers.clear()
    accelerator.epochs(1)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (range_loop, r"write `for epoch in accelerator\.epochs\(num_epochs\):` in place of"),
        (backward_in_evaluation, r"in a loop over evaluation batches: .* Call model\.train\(\)"),
        (late_registration, r"register_for_checkpointing\(\) was called after training has begun"),
        (
            hook_of_load_state,
            r"Leave the hook out, and pass .* to accelerator\.register_for_checkpointing\(\)",
        ),
        (late_prepare, r"prepare\(\) got a model after training has begun"),
        (load_in_a_new_job, "by a job without state: an elastic job resumes from its own checkpoints"),
        (save_before, r"save_state\(\) was called before training"),
        (skip_batches, "continues where training is, by itself"),
        (remove_wrapper, "would remove the forward pass that averages the gradients"),
        (no_optimizer, r"accelerator\.prepare\(\) got no optimizer"),
    ],
)
def test_a_use_that_would_train_wrongly_is_refused(make: Make, use: Loop, message: str) -> None:
    accelerator = make()
    with pytest.raises(WorkerError, match=message):
        use(accelerator, *prepared(accelerator))


def test_a_loader_for_another_batch_size_is_refused(make: Make) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    _, _, batches = prepared(accelerator)
    message = "has batch_size=8 and gradient_accumulation_steps=2, but the batch size of the job is 8"
    for _ in accelerator.epochs(1):
        with pytest.raises(WorkerError, match=message):
            next(iter(batches))
        break


# -- the installed version --------------------------------------------------------------------------------


def test_without_accelerate_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "accelerate" or name.startswith("adascale_frameworks.accelerate"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "adascale.accelerate")
    with pytest.raises(MissingExtraError, match=r"pip install 'adascale-operator\[accelerate\]'"):
        importlib.import_module("adascale.accelerate")


def test_adascale_alone_imports_no_framework() -> None:
    program = "import adascale, sys, json; print(json.dumps(sorted(sys.modules)))"
    modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout
    assert "adascale_frameworks" not in json.loads(modules)
    assert "accelerate" not in json.loads(modules)
