"""The connections between members, in one process."""

import secrets
import threading

from adascale_worker.agent_channel import Assignment, Member
from adascale_worker.membership_links import MembershipLinks, listen

ADDRESS = "127.0.0.1"


def test_the_coordinators_own_arrival_ends_a_wait() -> None:
    """It arrives last in most changes, because the new replicas wait while it trains."""
    listener = listen(ADDRESS)
    members = tuple(Member(replica, "", ADDRESS, listener.getsockname()[1], None) for replica in range(2))
    changed = threading.Event()
    links = MembershipLinks(
        Assignment(1, 0, members, "", {}), listener, secrets.token_hex(), 5.0, lambda _: changed.set()
    )
    try:
        links.arrive((1, 10, 80))
        assert changed.wait(30)
        assert not links.all_arrived
    finally:
        links.close()
        listener.close()
