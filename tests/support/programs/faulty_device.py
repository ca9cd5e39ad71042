"""`journal.py` on a device that computes one element of each product of matrices wrong."""

import runpy
from pathlib import Path

import torch
from torch import Tensor

_matmul = torch.matmul


def _wrong(left: Tensor, right: Tensor) -> Tensor:
    product = _matmul(left, right)
    product[-1, -1] += 1
    return product


torch.matmul = _wrong  # type: ignore[assignment]
runpy.run_path(str(Path(__file__).with_name("journal.py")), run_name="__main__")
