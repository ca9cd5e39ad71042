"""The check of a device before its replica joins, on devices that are right and on faulty ones."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adascale_worker.process.device import REPETITIONS, find_fault

CPU = torch.device("cpu")
matmul, empty = torch.matmul, torch.empty


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_device_passes_with_each_precision_and_random_numbers_stay_the_same(
    device: torch.device, precision: str
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    state = torch.get_rng_state()
    try:
        with torch.autocast(device.type, torch.bfloat16), torch.inference_mode():
            assert find_fault(device) is None
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(torch.get_rng_state(), state)


def becomes_nan(product: Tensor) -> None:
    product[3, 5] = math.nan


def loses_a_bit(product: Tensor) -> None:
    product[3, 5] += 1


@pytest.mark.parametrize("repetition", [1, REPETITIONS])
@pytest.mark.parametrize(("fault", "got"), [(becomes_nan, r"nan"), (loses_a_bit, r"(-?\d+)\.0")])
def test_a_device_fails_if_one_element_of_one_product_is_wrong(
    fault: Callable[[Tensor], None], got: str, repetition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = 0

    def faulty(left: Tensor, right: Tensor) -> Tensor:
        nonlocal products
        products += 1
        product = matmul(left, right)
        if products == repetition:
            fault(product)
        return product

    monkeypatch.setattr(torch, "matmul", faulty)
    described = find_fault(CPU) or ""
    found = re.fullmatch(
        rf"device cpu has failed its check: in a product of float32 matrices, number {repetition} of "
        rf"{REPETITIONS}, 1 of \d+ elements are wrong. Expected (-?\d+) at \[3, 5\], got {got}",
        described,
    )
    assert found is not None, described
    if fault is loses_a_bit:
        assert int(found[2]) == int(found[1]) + 1


@pytest.mark.parametrize(
    ("kind", "message", "fails"),
    [
        (torch.AcceleratorError, "CUDA error: uncorrectable ECC error\nCUDA kernel errors might be", True),
        (torch.AcceleratorError, "CUDA error: out of memory\nCUDA kernel errors might be", False),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`", True),
    ],
)
def test_an_error_of_a_device_is_a_fault_unless_its_memory_is_full(
    kind: type[RuntimeError], message: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report_error(*_: Tensor) -> Tensor:
        raise kind(message)

    monkeypatch.setattr(torch, "matmul", report_error)
    fault = f"device cpu has failed its check: it reports an error: {message.splitlines()[0]}"
    assert find_fault(CPU) == (fault if fails else None)


def test_a_device_on_which_an_operation_is_refused_is_not_checked_and_the_program_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise RuntimeError("this product is not implemented\nSee the documentation")

    monkeypatch.setattr(torch, "matmul", refuse)
    assert find_fault(CPU) is None
    assert capsys.readouterr().err == (
        "adascale: device cpu was not checked: this product is not implemented\n"
    )


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("passes", [True, False])
def test_a_device_is_checked_with_any_algorithms_and_the_mode_of_the_program_stays_the_same(
    device: torch.device,
    mode: int,
    passes: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without CUBLAS_WORKSPACE_CONFIG, a product with cuBLAS warns in mode 1 and fails in mode 2."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    modes: set[int] = set()

    def product(left: Tensor, right: Tensor) -> Tensor:
        modes.add(torch.get_deterministic_debug_mode())
        result = matmul(left, right)
        result[0, 0] += 0 if passes else 1
        return result

    monkeypatch.setattr(torch, "matmul", product)
    torch.set_deterministic_debug_mode(mode)
    try:
        assert (find_fault(device) is None) == passes
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode(0)
    assert modes == {0}
    assert "was not checked" not in capsys.readouterr().err
