"""How many examples of a property are drawn."""

import os

FACTOR = int(os.environ.get("ADASCALE_EXAMPLES") or (10 if os.environ.get("ADASCALE_RELEASE_CHECK") else 1))


def examples(count: int) -> int:
    """Return `count`, or ten times as many in `make release-check`, or `ADASCALE_EXAMPLES` times as many."""
    return count * FACTOR
