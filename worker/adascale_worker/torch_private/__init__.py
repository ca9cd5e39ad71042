"""Everything the worker uses of torch that torch does not document: no other package may use such a name.

Each function names the private part that it uses and why the public interface is not enough. Each module has
the parts of one subject of torch. A part that the installed torch does not have raises
`UnsupportedTorchError`, with its name and the version.

The tests of the worker pass with these versions:

- torch 2.9.0, the lowest that `pyproject.toml` allows. Up to 2.7, a process can wait forever while it
  destroys a process group (github.com/pytorch/pytorch/pull/154976), thus at any change of the replicas. Up to
  2.8, gradients of `fully_shard` (FSDP2) cannot be read (`FSDPModule.set_custom_reduce_scatter`);
- torch 2.15.0, the version in `requirements.lock`.
"""

from __future__ import annotations

from typing import Any

import torch

from adascale_worker.errors import UnsupportedTorchError

TESTED_VERSIONS = ("2.9.0", "2.15.0")


def private_part(owner: Any, name: str) -> Any:
    """Return `owner.name`."""
    try:
        return getattr(owner, name)
    except AttributeError:
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no `{owner_name}.{name}`, which AdaScale needs; "
            f"install a version that AdaScale is tested with: {', '.join(TESTED_VERSIONS)}"
        ) from None
