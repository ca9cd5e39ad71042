"""A job's rendezvous as text, for a column of the database."""

import json
from functools import lru_cache

from adascale_core.rendezvous import Rendezvous


def rendezvous_to_text(rendezvous: Rendezvous) -> str:
    """Return the rendezvous as JSON."""
    return json.dumps(rendezvous.to_json(), separators=(",", ":"))


@lru_cache(maxsize=1024)  # each report reads its job's rendezvous, which rarely changes
def rendezvous_from_text(text: str) -> Rendezvous:
    """Return the rendezvous from the text of `rendezvous_to_text`."""
    return Rendezvous.from_json(json.loads(text))
