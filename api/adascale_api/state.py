"""A job's rendezvous, to and from the JSON that the database keeps."""

from typing import Any

from adascale_core.rendezvous import Rendezvous


def state_to_json(state: Rendezvous) -> dict[str, Any]:
    """The state as a JSON object's members."""
    return state.to_json()


def state_from_json(members: dict[str, Any]) -> Rendezvous:
    """The state from what `state_to_json` made of it."""
    return Rendezvous.from_json(members)
