"""How many examples of a property are drawn."""

import os

FACTOR = 10 if os.environ.get("ADASCALE_RELEASE_CHECK") else 1


def examples(count: int) -> int:
    """Return `count`, or ten times as many in `make release-check`."""
    return count * FACTOR
