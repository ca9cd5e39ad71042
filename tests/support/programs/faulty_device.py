"""Run a program on a device that computes one element of each product of matrices wrong.

The argument is the name of the program. Environment: FAULTY, the index of the process of its replica whose
device is faulty (0 if not set).
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor

_matmul = torch.matmul


def _wrong(left: Tensor, right: Tensor) -> Tensor:
    product = _matmul(left, right)
    product[-1, -1] += 1
    return product


if os.environ.get("ADASCALE_LOCAL_RANK", "0") == os.environ.get("FAULTY", "0"):
    torch.matmul = _wrong  # type: ignore[assignment]
runpy.run_path(str(Path(__file__).with_name(sys.argv[1])), run_name="__main__")
