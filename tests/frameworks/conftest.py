"""What the tests of frameworks need."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def default_process_group() -> Iterator[None]:
    """Leave no default process group to the tests of another module in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
