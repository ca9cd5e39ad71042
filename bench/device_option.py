"""The option `--device` of the benchmarks that run on the CPU and on a GPU."""

import argparse
import os

import torch

from adascale_controller.local.machine import visible_gpus


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="where networks and data are"
    )


def check(parser: argparse.ArgumentParser, device: str) -> None:
    """End the program with exit code 2 and one line if this machine does not have the device."""
    if device == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2,
            f"{parser.prog}: --device cuda needs a GPU with CUDA, and torch {torch.__version__} finds none; "
            "use --device cpu, or a machine with a GPU\n",
        )


def environment(device: str, replica: int) -> dict[str, str]:
    """Return the variables with which a process sees this device alone, and of several GPUs one.

    As with `adascale run`, each replica has a GPU of its own, but they share GPUs if there are fewer of them.
    """
    gpus = visible_gpus(os.environ) if device == "cuda" else [""]
    return {"CUDA_VISIBLE_DEVICES": gpus[replica % len(gpus)]}
