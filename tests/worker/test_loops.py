"""Programs with wrong loops are refused, and unusual but correct loops train: `programs/loops.py`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from adascale import ElasticTrainer
from adascale_core.failures import EXIT_INVALID_PROGRAM
from adascale_worker.errors import WorkerError
from support.launch import PROGRAMS, run_program
from support.training import FIXED, MakeTrainer, entered, learn, network, samples, sgd

TORCHRUN_FAILED = 1
PROGRAM = str(PROGRAMS / "loops.py")


def run(loop: str, replicas: int = 0, **environ: Any) -> tuple[int, str]:
    """Run the program, and return its exit code and its output."""
    ended = run_program(PROGRAM, replicas=replicas, LOOP=loop, **environ)
    return ended.returncode, ended.stdout + ended.stderr


def require_refused(result: tuple[int, str], message: str) -> None:
    """Check that a program failed with a message, and without a traceback of its own."""
    code, output = result
    assert code in (EXIT_INVALID_PROGRAM, TORCHRUN_FAILED), output
    assert re.search(message, output), output
    assert re.search(rf"adascale: .* \({re.escape(PROGRAM)}, line \d+\)$", output, re.MULTILINE), output
    assert f'File "{PROGRAM}"' not in output, "a traceback was printed"
    assert not re.search(r"^trained \d", output, re.MULTILINE)


def require_trained(result: tuple[int, str]) -> str:
    code, output = result
    assert code == 0, output
    assert "trained" in output
    return output


# -- gradients ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        "method",
        "evaluation mode",
        "unused parameters",
        "backward twice, forward twice",
    ],
)
def test_gradients_are_averaged_however_the_program_has_computed_them(loop: str) -> None:
    """The weights are compared at the end of training."""
    output = require_trained(run(loop, replicas=2))
    assert "Warning" not in output
    assert not messages(output)


@pytest.mark.slow
def test_a_parameter_outside_the_model_is_refused_on_two_replicas_and_warned_of_on_one() -> None:
    found = r"the optimizer has 1 parameters that are not in the model \(the first has shape \(2,\)\)"
    require_refused(run("parameter outside the model", replicas=2), f"adascale: {found}")
    assert re.search(f"Warning: {found}", require_trained(run("parameter outside the model")))


@pytest.mark.slow
def test_a_second_optimizer_is_refused_on_two_replicas_and_warned_of_once_on_one() -> None:
    found = r"step\(\) was called of a second optimizer \(Adam\), whose gradients are not averaged"
    require_refused(run("second optimizer", replicas=2), f"adascale: {found}")
    warning = r"RuntimeWarning: step\(\) was called of a second optimizer \(Adam\), .* On 1 replica this"
    assert len(re.findall(warning, require_trained(run("second optimizer")))) == 1


@pytest.mark.parametrize(
    ("enter", "message"),
    [
        (
            lambda trainer, model, optimizer: trainer.program_reentry(optimizer, model),
            "program_reentry got model of type SGD: call program_reentry(model, optimizer",
        ),
        (
            lambda trainer, model, optimizer: trainer.program_reentry(model, optimizer, register=[model]),
            "program_reentry got register of type list: it must be a dict of objects",
        ),
        (
            lambda trainer, model, optimizer: trainer.program_reentry(nn.DataParallel(model), optimizer),
            "program_reentry got a model of type DataParallel",
        ),
        (
            lambda trainer, model, optimizer: trainer.program_reentry(
                model, optimizer, StepLR(sgd(model), step_size=1)
            ),
            "the scheduler (StepLR) belongs to another optimizer",
        ),
        (
            lambda trainer, _, optimizer: trainer.program_reentry(network(), optimizer),
            "the optimizer has no parameter of the model",
        ),
    ],
)
def test_wrong_objects_are_refused(
    make_trainer: MakeTrainer, enter: Callable[..., object], message: str
) -> None:
    model = network()
    with pytest.raises(WorkerError, match=re.escape(message)):
        enter(make_trainer(**FIXED), model, sgd(model))


def test_a_parameter_group_that_is_added_later_is_refused(make_trainer: MakeTrainer) -> None:
    *_, optimizer = entered(make_trainer, **FIXED)
    with pytest.raises(WorkerError, match="add_param_group was called after program_reentry"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def messages(output: str) -> list[str]:
    """Return the messages of ours, except that a replica is slow, as one can be beside other programs."""
    return [
        line for line in output.splitlines() if "adascale" in line and " is slow: in each step " not in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "when", "name"),
    [
        ("begins with other parameters on one rank", "at the beginning", "weight"),
        ("unfreezes others on one rank", "after step 4", "weight"),
    ],
)
def test_replicas_that_train_different_parameters_stop_with_the_name_of_one(
    loop: str, when: str, name: str
) -> None:
    code, output = run(loop, replicas=2)
    message = (
        f"adascale: the 2 replicas train different parameters {when}: requires_grad of 'parts.head.{name}'"
    )
    assert code == TORCHRUN_FAILED
    assert message in output, output
    assert f'File "{PROGRAM}"' not in output, "a traceback was printed"


@pytest.mark.slow
def test_replicas_with_different_weights_stop_on_all_ranks() -> None:
    result = run("changes weights on one rank", replicas=2)
    message = "the weights of the 2 replicas differ after step [0-9]+: a weight of 'parts.head.bias'"
    require_refused(result, f"adascale: {message}")
    assert len(re.findall(message, result[1])) == 2, "both ranks name the reason"


@pytest.mark.slow
def test_replicas_with_different_learning_rates_stop_on_all_ranks() -> None:
    result = run("changes lr on one rank", replicas=2)
    message = "adascale: the learning rates of the 2 replicas differ after step"
    require_refused(result, message)
    assert result[1].count("such as one of evaluation.means") == 2, "both ranks name the reason"


@pytest.mark.slow
def test_a_step_on_one_rank_only_is_refused() -> None:
    message = r"rank 1 made no backward pass for a batch \(.*\) after step 0, but rank 0 is in step 1"
    require_refused(run("steps on rank 0", replicas=2), f"adascale: {message}")


@pytest.mark.slow
def test_different_weights_are_found_at_the_end_of_a_short_training() -> None:
    message = "adascale: the weights of the 2 replicas differ after step 60: a weight of 'parts.head.bias'"
    require_refused(run("changes weights on one rank, once", replicas=2), message)


# -- gradients that are averaged once more -----------------------------------------------------------------


@pytest.mark.slow
def test_accelerate_can_prepare_a_model_without_wrapping_it() -> None:
    output = require_trained(run("Accelerate without a wrapper", replicas=2))
    assert "Warning" not in output


# -- micro-batches without a backward pass on one replica -------------------------------------------------


@pytest.mark.slow
def test_a_weighted_micro_batch_without_a_backward_pass_is_refused() -> None:
    result = run("skips the last weighted micro-batch", replicas=2)
    require_refused(
        result, r"adascale: trainer\.weighted\(\) was used in 1 of the 2 micro-batches of a step, on this"
    )
    assert "terminate called" not in result[1], "the other replica stops with an error, too"


@pytest.mark.slow
def test_an_unweighted_micro_batch_without_a_backward_pass_counts_as_a_gradient_of_zero() -> None:
    require_trained(run("skips the first micro-batch", replicas=2))


# -- steps and epochs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ("without trainer.step", r"after all batches of epoch 0: .*trainer\.step\(0\)"),
        ("accumulates", r"after backward passes on 4 batches: the trainer accumulates gradients itself"),
        ("steps twice", r"optimizer\.step\(\) was called twice for one batch"),
        ("without zero_grad", r"the gradients of the step before were not deleted"),
        ("without backward", "the first 3 steps had no gradients"),
        ("trainer.step for each batch", r"trainer\.step\(0\) was called inside the loop over"),
        ("one iterator for all epochs", "epoch 1 has ended, but has had no batch"),
    ],
)
def test_a_wrong_loop_is_refused(make_trainer: MakeTrainer, loop: str, message: str) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    with pytest.raises(WorkerError, match=message):
        train_wrongly(trainer, model, optimizer, loop)


def train_wrongly(
    trainer: ElasticTrainer, model: nn.Module, optimizer: torch.optim.Optimizer, loop: str
) -> None:
    batches = iter(trainer.dataloader(samples()))
    for epoch in range(2):
        if epoch > 0 and loop != "one iterator for all epochs":
            batches = iter(trainer.dataloader(samples()))
        for number, (_, x, y) in enumerate(batches):
            if loop != "without zero_grad" and not (loop == "accumulates" and number % 4):
                optimizer.zero_grad()
            if loop != "without backward":
                learn(model, x, y)
            if loop != "accumulates" or number % 4 == 3:
                optimizer.step()
            if loop == "steps twice":
                optimizer.step()
            if loop == "trainer.step for each batch":
                trainer.step(epoch)
        if loop != "without trainer.step":
            trainer.step(epoch)


@pytest.mark.slow
def test_a_wrong_loop_is_refused_on_two_replicas() -> None:
    require_refused(run("steps twice", replicas=2), r"adascale: optimizer\.step\(\) was called twice")


@pytest.mark.slow
def test_a_batch_that_is_left_out_on_one_replica_is_refused_on_all() -> None:
    message = (
        r"adascale: rank 0 made no backward pass for a batch \(.*loops\.py, line \d+\) after step 1, but "
        r"rank 1 is in step 2, which needs all 2 replicas\. Leave out a batch on all replicas or on none"
    )
    require_refused(run("leaves out a batch", replicas=2), message)


SKIPPING_LOOPS = (
    "steps and leaves out a batch on all",
    "skips and sets gradients to None",
    "NaN gradients are replaced",
)


@pytest.mark.parametrize(
    ("loop", "replicas"),
    [
        ("plain", 1),
        *(pytest.param(loop, 2, marks=pytest.mark.slow) for loop in ("GAN", *SKIPPING_LOOPS)),
    ],
)
def test_a_correct_loop_trains_without_a_warning(loop: str, replicas: int) -> None:
    output = require_trained(run(loop, replicas))
    assert "Warning" not in output
    assert not messages(output)


# -- weights that are not finite ------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_that_stay_nan_end_training_and_keep_the_checkpoint_from_before(tmp_path: Path) -> None:
    result = run("NaN", STATE=tmp_path, MAX_NONFINITE_STEPS=5)
    require_refused(result, r"weights are NaN or infinite after each of 5 consecutive steps, up to step 36:")
    # The gradients of a fixed batch on one replica are not measured, so weights are read every 32 steps.
    assert result[1].count("RuntimeWarning: weights are NaN or infinite after step 32.") == 1, result[1]
    code, output = run("plain", STATE=tmp_path)
    assert code == 0, output
    batches = re.search(r"trained (\d+) batches", output)
    assert batches
    assert 60 - 19 <= int(batches[1]) < 60, "resumed at a step before 20"


@pytest.mark.slow
def test_training_that_ends_with_nan_weights_fails() -> None:
    require_refused(run("NaN", STEPS=22), "weights are NaN or infinite after step 22: no checkpoint is saved")


@pytest.mark.slow
def test_a_program_without_required_steps_fails_if_it_ends_with_nan_weights() -> None:
    message = "weights are NaN or infinite after step 24: no checkpoint is saved"
    code, output = run("NaN", EPOCHS=4)
    assert code == EXIT_INVALID_PROGRAM, output
    assert f"adascale: {message}" in output
