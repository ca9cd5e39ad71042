"""Programs with several models and optimizers, on one replica, against a plain loop of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adascale import AdaScale, ElasticTrainer
from adascale_worker.errors import UnusableCheckpointError, WorkerError
from support.gan import BCE, Gan, noise_of
from support.training import ACCUMULATING, FIXED, MakeTrainer, equal, samples

LOOPS = [
    "alternating",
    "generator first",
    "two backward passes",
    "changed between two passes",
    "deleted by hand",
    "zeroed by another module",
    "zeroed together",
    "frozen",
    "gradient penalty",
]


def train(
    trainer: ElasticTrainer, gan: Gan, *, loop: str = "alternating", epochs: range = range(2)
) -> list[torch.Tensor]:
    """Train, and return the sample indices of each micro-batch."""
    batches = []
    for epoch in epochs:
        for index, x, _ in trainer.dataloader(samples()):
            gan.learn(x, noise_of(index), loop=loop)
            gan.step_schedulers()
            batches.append(index)
        trainer.step(epoch)
    return batches


@pytest.mark.parametrize(("loop", "adam"), [*((loop, True) for loop in LOOPS), ("alternating", False)])
def test_at_the_fixed_size_the_weights_are_those_of_a_plain_loop_bit_for_bit(
    make_trainer: MakeTrainer, loop: str, adam: bool
) -> None:
    gan, plain = Gan(adam=adam), Gan(adam=adam)
    trainer = make_trainer(**FIXED)
    gan.enter(trainer)
    for index in train(trainer, gan, loop=loop):
        plain.learn(samples()[index][1], noise_of(index), loop=loop)
        plain.step_schedulers()
    assert equal(gan.parameters(), plain.parameters())
    assert trainer.steps == 12
    assert trainer.progress == 12


def test_a_scheduler_that_steps_before_the_first_optimizer_is_not_late(make_trainer: MakeTrainer) -> None:
    def step(gan: Gan, index: torch.Tensor) -> dict[str, Any]:
        between = gan.schedulers["generator"].step
        gan.learn(samples()[index][1], noise_of(index), loop="generator first", between=between)
        gan.schedulers["discriminator"].step()
        return gan.schedulers["generator"].state_dict()

    gan, plain = Gan(), Gan()
    trainer = make_trainer(**FIXED, epochs=2)
    gan.enter(trainer)
    steps = [
        (index, step(gan, index)) for _ in trainer.epochs() for index, *_ in trainer.dataloader(samples())
    ]
    assert [step(plain, index) for index, _ in steps] == [state for _, state in steps]
    assert equal(gan.parameters(), plain.parameters())


def test_gradients_of_micro_batches_are_averaged_for_each_optimizer(make_trainer: MakeTrainer) -> None:
    """The plain loop makes the step of all micro-batches by itself, with the losses in the same order."""
    gan, plain = Gan(adam=False), Gan(adam=False)
    trainer = make_trainer(**ACCUMULATING)
    gan.enter(trainer)
    batches = train(trainer, gan, epochs=range(1))
    assert trainer.accumulation == 3
    assert trainer.steps == len(batches) // 3 == 4
    d, g = plain.optimizers["discriminator"], plain.optimizers["generator"]
    for step in range(trainer.steps):
        micro_batches = batches[3 * step : 3 * step + 3]
        sums: dict[nn.Parameter, torch.Tensor] = {}

        def gradients(loss: torch.Tensor, model: nn.Module) -> None:
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                sums[parameter] = sums.get(parameter, torch.zeros(())) + gradient  # noqa: B023

        for number, index in enumerate(micro_batches):
            fake = plain.generator(noise_of(index))
            gradients(plain.discriminator_loss(samples()[index][1], fake.detach()), plain.discriminator)
            if number == 2:
                for parameter in plain.discriminator.parameters():
                    parameter.grad = sums[parameter] / 3
                nn.utils.clip_grad_norm_(plain.discriminator.parameters(), 0.5)
                d.step()
            gradients(plain.generator_loss(fake), plain.generator)
        for parameter in plain.generator.parameters():
            parameter.grad = sums[parameter] / 3
        g.step()
        plain.step_schedulers()
    for found, expected in zip(gan.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_training_continues_from_a_checkpoint_bit_for_bit(
    make_trainer: MakeTrainer, tmp_path: Path, durable_checkpoints: None
) -> None:
    whole = Gan(norm=True)
    trainer = make_trainer(**FIXED)
    whole.enter(trainer)
    train(trainer, whole, epochs=range(4))
    saves = {"checkpoint_dir": tmp_path, "checkpoint_interval": 0.0, **FIXED}
    first = Gan(norm=True)
    trainer = make_trainer(**saves)
    first.enter(trainer)
    train(trainer, first, epochs=range(1))
    # The process is killed after the first optimizer's step.
    loop = trainer.dataloader(samples())
    for _ in range(2):
        index, x, _ = next(loop)
        gan_step(first, x, index)
    index, x, _ = next(loop)
    first.optimizers["discriminator"].zero_grad()
    first.discriminator_loss(x, first.generator(noise_of(index)).detach()).backward()
    first.optimizers["discriminator"].step()
    trainer.close()
    second = Gan(norm=True, seed=9)
    trainer = make_trainer(**saves)
    state = second.enter(trainer)
    assert state.restored
    assert trainer.steps == 8
    train(trainer, second, epochs=range(state.epoch, 4))
    assert equal(second.parameters(), whole.parameters())
    assert all(map(torch.equal, second.generator.buffers(), whole.generator.buffers()))
    assert second.schedulers["generator"].state_dict() == whole.schedulers["generator"].state_dict()


def gan_step(gan: Gan, x: torch.Tensor, index: torch.Tensor) -> None:
    gan.learn(x, noise_of(index))
    gan.step_schedulers()


def test_an_optimizer_may_make_a_step_in_some_batches_only(make_trainer: MakeTrainer) -> None:
    gan, plain = Gan(), Gan()
    trainer = make_trainer(**FIXED)
    gan.enter(trainer)
    batches = []

    def learn(gan: Gan, x: torch.Tensor, index: torch.Tensor, step: int) -> None:
        d, g = gan.optimizers.values()
        d.zero_grad()
        gan.discriminator_loss(x, gan.generator(noise_of(index)).detach()).backward()
        d.step()
        if step % 3 == 2:
            g.zero_grad()
            gan.generator_loss(gan.generator(noise_of(index))).backward()
            g.step()

    for index, x, _ in trainer.dataloader(samples()):
        learn(gan, x, index, trainer.steps)
        batches.append((x, index))
    for step, (x, index) in enumerate(batches):
        learn(plain, x, index, step)
    assert equal(gan.parameters(), plain.parameters())
    assert trainer.steps == len(batches) == 6


def test_a_grad_scaler_scales_the_losses_of_both_and_skips_each_by_itself(make_trainer: MakeTrainer) -> None:
    def learn(gan: Gan, scaler: torch.amp.GradScaler, x: torch.Tensor, index: torch.Tensor, bad: str) -> None:
        d, g = gan.optimizers.values()
        d.zero_grad()
        fake = gan.generator(noise_of(index))
        loss = gan.discriminator_loss(x, fake.detach())
        scaler.scale(loss * (float("inf") if bad == "d" else 1.0)).backward()
        scaler.unscale_(d)
        nn.utils.clip_grad_norm_(gan.discriminator.parameters(), 0.5)
        scaler.step(d)
        g.zero_grad()
        loss = gan.generator_loss(fake)
        scaler.scale(loss * (float("inf") if bad == "g" else 1.0)).backward()
        scaler.step(g)
        scaler.update()

    gan, plain = Gan(), Gan()
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    trainer = make_trainer(**FIXED)
    gan.enter(trainer, register={"scaler": scalers[0]})
    bads = ["", "d", "", "g", "", "", ""]
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, x, _ in trainer.dataloader(samples()):
        learn(gan, scalers[0], x, index, bads[len(batches)])
        batches.append((x, index))
    for number, (x, index) in enumerate(batches):
        learn(plain, scalers[1], x, index, bads[number])
    assert len(batches) == 7
    assert trainer.steps == 6, "a skipped step of the first optimizer is not counted"
    assert equal(gan.parameters(), plain.parameters())
    assert scalers[0].get_scale() == scalers[1].get_scale()


class Memory(nn.Module):
    """Memory for 4 samples in the loss of the generator."""

    def __init__(self, *, is_short: bool) -> None:
        super().__init__()
        self.is_short = is_short
        self.is_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_short and self.is_second and len(x) > 4:
            torch.empty(1 << 60)
        return x


def test_a_batch_that_does_not_fit_after_the_first_step_is_repeated_in_smaller_batches(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*, is_short: bool, **bounds: Any) -> tuple[list[int], Gan]:
        gan, memory = Gan(norm=True), Memory(is_short=is_short)
        gan.discriminator.layers.append(memory)
        average = torch.optim.swa_utils.AveragedModel(gan.discriminator)
        trainer = make_trainer(batch_size=12, **bounds)
        gan.enter(trainer, register={"average": average})
        sizes = []

        def between() -> None:
            memory.is_second = True
            if trainer.made_step:
                # Between the two steps, so that a discarded step has already changed it.
                average.update_parameters(gan.discriminator)

        for epoch in range(2):
            for index, x, _ in trainer.dataloader(samples()):
                memory.is_second = False
                gan.learn(x, noise_of(index), between=between)
                gan.step_schedulers()
                sizes.append(len(index))
            trainer.step(epoch)
        assert trainer.steps == average.n_averaged == 8
        trainer.close()
        return sizes, gan

    sizes, gan = run(is_short=True)
    assert sizes == [12, 6, *[3] * 32]
    assert "a local batch of 12 samples does not fit into the memory of cpu" in capsys.readouterr().err
    expected_sizes, expected = run(is_short=False, local_bsz_bounds=(1, 3))
    assert sizes[2:] == expected_sizes
    assert equal(gan.parameters(), expected.parameters())
    assert all(map(torch.equal, gan.generator.buffers(), expected.generator.buffers())), "BatchNorm's too"


# -- the gain -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adam", [True, False], ids=["Adam", "SGD"])
def test_each_optimizer_has_the_gain_that_adascale_measures_by_itself(
    make_trainer: MakeTrainer, adam: bool
) -> None:
    """With hooks of autograd, in a loop in which no pass reaches the parameters of the other optimizer."""
    gan, plain = Gan(adam=adam), Gan(adam=adam)
    trainer = make_trainer(**ACCUMULATING)
    gan.enter(trainer)
    own = {
        name: AdaScale(
            optimizer, num_gradients_to_accumulate=3, scale=1.0, is_scaled_loss=False, disjoint_pairs=True
        )
        for name, optimizer in plain.optimizers.items()
    }
    parts = trainer._training.steps.optimizer.parts  # type: ignore[union-attr]

    def losses(gan: Gan, x: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "discriminator": BCE(gan.discriminator(x), torch.ones(4, 1)),
            "generator": nn.functional.mse_loss(gan.generator(noise_of(index)), torch.ones(4, 6)),
        }

    batches, found = [], []
    for index, x, _ in trainer.dataloader(samples()):
        for name, loss in losses(gan, x, index).items():
            gan.optimizers[name].zero_grad()
            loss.backward()
            gan.optimizers[name].step()
        batches.append((x, index))
        found.append([part.estimate for part in parts.values()])
    for number, (x, index) in enumerate(batches):
        for name, loss in losses(plain, x, index).items():
            loss.backward()
            if number % 3 == 2:
                own[name].step()
                own[name].zero_grad()
        if number % 3 == 2:
            for estimate, adascale in zip(found[number], own.values(), strict=True):
                expected = adascale.estimate
                assert (estimate is None) == (expected is None)
                if estimate is not None and expected is not None:
                    # A difference of norms that are about as large as the variance, in float32.
                    rounding = 1e-6 * expected.grad_var
                    assert estimate.grad_sqr == pytest.approx(expected.grad_sqr, abs=rounding)
                    assert estimate.grad_var == pytest.approx(expected.grad_var)
    assert trainer.steps == 4
    assert parts["generator"].grad_var > 0


def test_the_gain_of_the_job_is_the_lowest(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**ACCUMULATING)
    gan = Gan()
    gan.enter(trainer)
    assert trainer.adascale.gain() == 1, "nothing is measured yet"
    train(trainer, gan, epochs=range(2))
    parts = trainer._training.steps.optimizer.parts  # type: ignore[union-attr]
    gains = {name: part.predict_gain(3.0) for name, part in parts.items()}
    assert gains["discriminator"] != gains["generator"]
    assert trainer.adascale.predict_gain(3.0) == min(gains.values())
    assert trainer.adascale.predict_gain(50.0) == min(part.predict_gain(50.0) for part in parts.values())


def test_an_optimizer_that_trains_nothing_does_not_decide_the_gain(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**ACCUMULATING)
    gan = Gan()
    gan.enter(trainer)
    train(trainer, gan, epochs=range(2))
    parts = trainer._training.steps.optimizer.parts  # type: ignore[union-attr]
    (lower, slow), (higher, fast) = sorted((part.predict_gain(3.0), name) for name, part in parts.items())
    group, rate = gan.optimizers[slow].param_groups[0], gan.optimizers[slow].param_groups[0]["lr"]
    group["lr"] = 0.0
    assert trainer.adascale.predict_gain(3.0) == higher > lower
    gan.optimizers[fast].param_groups[0]["lr"] = 0.0
    assert trainer.adascale.predict_gain(3.0) == lower, "all have it"
    group["lr"] = rate
    assert trainer.adascale.predict_gain(3.0) == lower


# -- what is refused ------------------------------------------------------------------------------------


def wrong_loop(gan: Gan, x: torch.Tensor, index: torch.Tensor, wrong: str, batch: int) -> None:
    d, g = gan.optimizers.values()
    if wrong == "only the second steps":
        g.zero_grad()
        gan.generator_loss(gan.generator(noise_of(index))).backward()
        g.step()
        return
    if wrong == "accumulates":
        gan.discriminator_loss(x, gan.generator(noise_of(index)).detach()).backward()
        if batch % 2:
            d.step()
        return
    if wrong != "no zero_grad":
        d.zero_grad()
    if wrong != "no backward":
        gan.discriminator_loss(x, gan.generator(noise_of(index)).detach()).backward()
    d.step()
    if wrong == "twice":
        d.step()
    if wrong == "by the number of the batch" and batch % 2:
        g.zero_grad()
        gan.generator_loss(gan.generator(noise_of(index))).backward()
        g.step()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("only the second steps", r"'generator' made a step for a batch for which the first one, 'discrim"),
        ("accumulates", r"'discriminator' was called after backward passes on 2 batches"),
        ("no zero_grad", r"the step before of the optimizer 'discriminator' were not deleted"),
        ("no backward", r"the first 3 steps of the optimizer 'discriminator' had no gradients"),
        ("twice", r"'discriminator' was called twice for one batch"),
        ("by the number of the batch", r"'generator' was called for .* decide by trainer\.steps"),
    ],
)
def test_a_wrong_loop_is_refused(make_trainer: MakeTrainer, wrong: str, message: str) -> None:
    gan = Gan()
    bounds = ACCUMULATING if wrong == "by the number of the batch" else FIXED
    trainer = make_trainer(**bounds)
    gan.enter(trainer)

    def run() -> None:
        for batch, (index, x, _) in enumerate(trainer.dataloader(samples())):
            wrong_loop(gan, x, index, wrong, batch)

    with pytest.raises(WorkerError, match=message):
        run()


def test_a_step_outside_of_the_data_loop_is_refused(make_trainer: MakeTrainer) -> None:
    gan = Gan()
    trainer = make_trainer(**FIXED)
    gan.enter(trainer)
    trainer.get_local_bsz()
    with pytest.raises(WorkerError, match="'discriminator' was called outside of the loop over"):
        gan.optimizers["discriminator"].step()


def test_objects_that_do_not_belong_together_are_refused(make_trainer: MakeTrainer) -> None:
    gan = Gan()
    trainer = make_trainer(**FIXED)
    models, optimizers, schedulers = gan.models, gan.optimizers, gan.schedulers
    lists: Any = list(models.values()), list(optimizers.values())
    for arguments, message in (
        (lists, "got model of type list: call program_reentry"),
        ((models, optimizers["generator"]), "optimizer of type Adam: for several models or optimizers"),
        ((gan.generator, optimizers), "model of type Generator: for several models or optimizers"),
        ((models, {}), "optimizer of type dict"),
        ((models, {"the first": optimizers["generator"]}), "got the name 'the first' in optimizer"),
        ((models, optimizers, {"critic": schedulers["generator"]}), "a scheduler 'critic', but no optimizer"),
        ((models, optimizers, {"discriminator": schedulers["generator"]}), "belongs to another optimizer"),
        ((models, {**optimizers, "other": optimizers["generator"]}), "'generator' and 'other' have a"),
        (({**models, "all": nn.DataParallel(gan.generator)}, optimizers), "type DataParallel"),
    ):
        with pytest.raises(WorkerError, match=message):
            trainer.program_reentry(*arguments)


def test_an_evaluation_needs_the_model(make_trainer: MakeTrainer) -> None:
    gan = Gan()
    trainer = make_trainer(**FIXED)
    gan.enter(trainer)
    gan.generator.eval()
    with pytest.raises(WorkerError, match=r"trainer\.evaluation\(\) needs model=, .* got 2 models"):
        trainer.evaluation(samples(), batch_size=8)
    evaluation = trainer.evaluation(samples(), batch_size=16, model=gan.generator)
    for batch in evaluation:
        evaluation.add(count=len(batch[0]))
    assert evaluation.sums["count"] == 48


def test_a_checkpoint_of_other_optimizers_is_refused(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def optimizers(gan: Gan, *names: str) -> dict[str, torch.optim.Optimizer]:
        models = gan.models.values()
        return {
            name: torch.optim.SGD(model.parameters(), lr=0.1)
            for name, model in zip(names, models, strict=True)
        }

    saves = {"checkpoint_dir": tmp_path, **FIXED, "epochs": 1}
    gan = Gan()
    trainer = make_trainer(**saves)
    gan.optimizers, gan.schedulers = optimizers(gan, "generator", "discriminator"), {}
    gan.enter(trainer)
    train(trainer, gan, epochs=range(1))
    with pytest.raises(
        UnusableCheckpointError, match=r"optimizers \['discriminator', 'generator'\], the prog"
    ):
        make_trainer(**saves).program_reentry(gan.models, optimizers(gan, "g", "d"))
    with pytest.raises(
        UnusableCheckpointError, match=r"saved with no scheduler, .* a set of schedulers \(disc"
    ):
        Gan().enter(make_trainer(**saves))


# -- the end of a loop ----------------------------------------------------------------------------------


def last_state(tmp_path: Path, make_trainer: MakeTrainer) -> tuple[Gan, ElasticTrainer]:
    """Return the state of the last checkpoint."""
    gan = Gan(seed=9, adam=False)
    gan.discriminator.layers.append(Memory(is_short=False))
    trainer = make_trainer(batch_size=8, local_bsz_bounds=(2, 8), epochs=2, checkpoint_dir=tmp_path)
    gan.enter(trainer)
    return gan, trainer


@pytest.mark.parametrize("ends", ["at the epoch", "at the end of training", "by finish"])
def test_a_loop_that_is_left_after_a_discarded_step_keeps_the_state_from_before_it(
    make_trainer: MakeTrainer, tmp_path: Path, ends: str
) -> None:
    gan, memory = Gan(adam=False), Memory(is_short=True)
    gan.discriminator.layers.append(memory)
    epochs = 1 if ends == "at the end of training" else 2
    trainer = make_trainer(batch_size=8, local_bsz_bounds=(2, 8), epochs=epochs, checkpoint_dir=tmp_path)
    gan.enter(trainer)
    before: list[torch.Tensor] = []

    def run_out_of_memory() -> None:
        memory.is_second = True

    for batch, (index, x, _) in enumerate(trainer.dataloader(samples())):
        if batch == 3:
            before = gan.parameters()
            gan.learn(x, noise_of(index), between=run_out_of_memory)
            break
        gan.learn(x, noise_of(index))
    memory.is_second = False
    assert equal(gan.parameters(), before)
    if ends == "by finish":
        trainer.finish("no longer improves")
    trainer.step(0)
    assert equal(gan.parameters(), before)
    assert trainer.steps == 3
    if ends == "at the epoch":
        assert not trainer.finished
        train(trainer, gan, epochs=range(1, 2))
        assert trainer.steps == 3 + 9
    assert trainer.finished
    end = gan.parameters()
    trainer.close()
    restored, trainer = last_state(tmp_path, make_trainer)
    assert equal(restored.parameters(), end)


@pytest.mark.parametrize("bounds", [FIXED, ACCUMULATING], ids=["fixed", "accumulating"])
def test_a_finish_between_two_optimizer_steps_saves_the_whole_step(
    make_trainer: MakeTrainer, tmp_path: Path, bounds: dict[str, Any]
) -> None:
    gan = Gan(adam=False)
    trainer = make_trainer(**bounds, epochs=2, checkpoint_dir=tmp_path)
    gan.enter(trainer)

    def finish() -> None:
        if trainer.made_step and trainer.steps == 3:
            trainer.finish("no longer improves")

    for index, x, _ in trainer.dataloader(samples()):
        gan.learn(x, noise_of(index), between=finish)
    assert trainer.finished
    assert trainer.steps == 3
    trainer.close()
    restored = Gan(seed=9, adam=False)
    again = make_trainer(**bounds, epochs=2, checkpoint_dir=tmp_path)
    restored.enter(again)
    assert again.finished
    assert again.steps == 3
    assert equal(restored.parameters(), gan.parameters())
