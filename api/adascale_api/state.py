"""A job's rendezvous, to and from the text that the database keeps."""

import json
from functools import lru_cache

from adascale_core.rendezvous import Rendezvous


def state_to_text(state: Rendezvous) -> str:
    """The state as JSON."""
    return json.dumps(state.to_json(), separators=(",", ":"))


@lru_cache(maxsize=1024)  # every report asks for its job's state, which seldom changes
def state_from_text(text: str) -> Rendezvous:
    """The state from what `state_to_text` made of it."""
    return Rendezvous.from_json(json.loads(text))
