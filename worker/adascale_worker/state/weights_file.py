"""A file with the weights of a model alone, in the format of safetensors, as other programs use it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from adascale_worker.errors import CheckpointError
from adascale_worker.state.file import TYPE_NAMES

_COMPILED = "_orig_mod."
"""The part of a name that `torch.compile` adds."""


def plain_weights(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the tensors in a model's state, in the memory of the host, by the names of the model.

    Tensors that share memory, such as tied weights, become copies of their own, which the format requires.
    """
    return {
        name.replace(_COMPILED, ""): torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(
            value.detach()
        )
        for name, value in state_dict.items()
        if isinstance(value, Tensor)
    }


def encode(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[int, Iterable[bytes | memoryview]]:
    """Return the length of the file, and its parts."""
    # Largest elements first: then each tensor is aligned without gaps, which the format does not allow.
    names = sorted(weights, key=lambda name: -weights[name].dtype.itemsize)
    # Programs expect the framework under this name.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name in names:
        tensor = weights[name]
        if tensor.dtype not in TYPE_NAMES:
            raise CheckpointError(
                f"{name} has type {tensor.dtype}, for which the format safetensors has no name: convert it, "
                "or leave it out of the model's state, by persistent=False for a buffer"
            )
        end = position + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    tensors = [weights[name].reshape(-1) for name in names if weights[name].numel()]
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
    parts += [tensor.view(torch.uint8).numpy().data for tensor in tensors]
    return len(text) + 8 + position, parts


def read_metadata(read: Callable[[int, int], bytes]) -> dict[str, str]:
    """Return the metadata of a file."""
    header = json.loads(read(8, 8 + int.from_bytes(read(0, 8), "little")))
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise ValueError("the header has no metadata")
    return dict(header["__metadata__"])
