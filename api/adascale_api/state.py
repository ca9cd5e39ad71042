"""A job's rendezvous, to and from the JSON that the database keeps."""

from types import MappingProxyType
from typing import Any

from adascale_core.messages import ActiveAllocation, Allocation, Registration
from adascale_core.rendezvous import Rendezvous


def state_to_json(state: Rendezvous) -> dict[str, Any]:
    """The state as a JSON object's members."""
    return {
        "wanted": state.wanted.to_json() if state.wanted else None,
        "active": state.active.to_json() if state.active else None,
        "broken": state.broken,
        "replicas": [told.to_json() for told in state.replicas.values()],
        "failures": state.failures,
        "disruptions": state.disruptions,
    }


def state_from_json(members: dict[str, Any]) -> Rendezvous:
    """The state from what `state_to_json` made of it."""
    wanted, active = members["wanted"], members["active"]
    told = [Registration.from_json(one) for one in members["replicas"]]
    return Rendezvous(
        wanted=Allocation.from_json(wanted) if wanted else None,
        active=ActiveAllocation.from_json(active) if active else None,
        broken=members["broken"],
        replicas=MappingProxyType({one.rank: one for one in told}),
        failures=members["failures"],
        disruptions=members["disruptions"],
    )
