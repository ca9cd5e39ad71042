"""The agent's connection to the metrics service, with answers in any order."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import pytest

from adascale_client import ServiceRefusedError, ServiceUnreachableError
from adascale_core.messages.allocation import Allocation, AllocationView, MemberView
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.names import HEARTBEAT_TIMEOUT
from adascale_worker.agent.heartbeat import REFUSAL_GRACE, Heartbeat
from support.launch import wait_until

REGISTRATION = Registration(0, "instance", ReplicaState.WAITING, 0, "127.0.0.1", 1)


def view(version: int, generation: int = 1) -> AllocationView:
    return AllocationView(version, Allocation(generation, 1), None, broken=False, complete=False)


def member_view(version: int) -> MemberView:
    return MemberView(version, Allocation(1, 1), None, broken=False, complete=False, key="secret")


class FakeClient:
    """Answers reads from a list, and registrations with a function. After the list it does not answer."""

    def __init__(self, *answers: Callable[[], AllocationView], registered: Callable[[], MemberView]):
        self._answers = list(answers)
        self._registered = registered
        self.known_versions: list[int | None] = []
        self.registrations: list[Registration] = []

    def get_allocation(
        self, _job_id: str, known_version: int | None = None, wait: float = 0.0
    ) -> AllocationView:
        self.known_versions.append(known_version)
        return self._answers.pop(0)() if self._answers else no_answer()

    def register(self, _job_id: str, registration: Registration) -> MemberView:
        self.registrations.append(registration.registration)
        return self._registered()


def no_answer() -> NoReturn:
    threading.Event().wait()
    raise AssertionError


def start_heartbeat(client: FakeClient) -> Heartbeat:
    heartbeat = Heartbeat(client, "a.b", lambda: None)  # type: ignore[arg-type]
    heartbeat.start()
    return heartbeat


def test_heartbeats_follow_the_interval_of_the_answers() -> None:
    """Otherwise it would wait for 3 s between the two registrations."""
    slow, asked = threading.Event(), []

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                asked.append(timeout)
                slow.set()
            return super().wait(timeout)

    client = FakeClient(registered=lambda: replace(member_view(1), heartbeat_interval=17.5))
    heartbeat = Heartbeat(client, "a.b", lambda: None)  # type: ignore[arg-type]
    heartbeat._changed = Condition()
    heartbeat.registration = REGISTRATION
    heartbeat.start()
    assert slow.wait(30)
    assert asked == [17.5]


@pytest.mark.parametrize(
    ("retry_after", "seconds"), [(None, HEARTBEAT_TIMEOUT), (20.0, 20.0), (210.0, 210.0)]
)
def test_a_refused_agent_waits_until_the_service_has_removed_members_that_are_gone(
    retry_after: float | None, seconds: float
) -> None:
    now, refused = 1000.0, threading.Event()

    def refuse() -> MemberView:
        raise ServiceRefusedError("another version", 409, retry_after)

    heartbeat = Heartbeat(
        FakeClient(registered=refuse),  # type: ignore[arg-type]
        "a.b",
        refused.set,
        clock=lambda: now,
    )
    heartbeat.start()
    heartbeat.register(REGISTRATION)
    assert refused.wait(30)
    now += seconds
    assert heartbeat.refusal is None
    now += REFUSAL_GRACE
    assert heartbeat.refusal == "the metrics service answers 409: another version"


def test_the_view_follows_a_service_that_has_lost_its_data() -> None:
    client = FakeClient(lambda: view(7, 3), lambda: view(2), lambda: view(2, 2), registered=no_answer)
    heartbeat = start_heartbeat(client)
    wait_until(lambda: client.known_versions == [None, 7, 2, 2], "three answers")
    assert heartbeat.view == view(2, 2), "another view with the same version is stored too"


def test_an_answer_that_was_overtaken_is_ignored() -> None:
    requested, released = threading.Event(), threading.Event()

    def new() -> AllocationView:
        requested.wait()
        return view(7, 3)

    def old() -> MemberView:
        requested.set()
        released.wait()
        return member_view(6)

    heartbeat = start_heartbeat(FakeClient(new, registered=old))
    register = threading.Thread(target=lambda: heartbeat.register(REGISTRATION, timeout=60.0))
    register.start()
    wait_until(lambda: heartbeat.view is not None, "the newer answer")
    released.set()
    register.join(60.0)
    assert heartbeat.view == view(7, 3)


def test_a_registration_is_retried_until_the_service_acknowledges_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = 2

    def fail_twice() -> MemberView:
        nonlocal failures
        if failures:
            failures -= 1
            raise ServiceUnreachableError("no answer")
        return member_view(1)

    client = FakeClient(registered=fail_twice)
    heartbeat = start_heartbeat(client)
    assert not heartbeat.register(REGISTRATION), "without a timeout it does not wait"
    assert heartbeat.register(REGISTRATION, timeout=60.0)
    assert client.registrations == [REGISTRATION] * 3
    assert heartbeat.error is None
    assert heartbeat.key == "secret"
    assert capsys.readouterr().out == "adascale-agent: no answer; retrying\n", "logged once"


def test_a_service_that_does_not_know_the_port_for_copies_gets_the_registration_without_it() -> None:
    """As those of version 0.1.0, to which an installation may be set back."""

    def answer() -> MemberView:
        if client.registrations[-1].state_port:
            raise ServiceRefusedError("state_port: Extra inputs are not permitted", 422)
        return member_view(1)

    client = FakeClient(registered=answer)
    heartbeat = start_heartbeat(client)
    assert heartbeat.register(replace(REGISTRATION, state_port=40124, pid=7), timeout=30)
    assert [(each.state_port, each.pid) for each in client.registrations[:2]] == [(40124, 7), (0, 0)]
