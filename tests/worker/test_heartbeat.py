"""The agent's line to the metrics service: what it believes, from answers in any order."""

import threading
from collections.abc import Callable

from adascale_core.messages import Allocation, AllocationView, Registration, ReplicaState
from adascale_worker.agent.heartbeat import Heartbeat
from support.launch import wait_until

TOLD = Registration(0, "instance", ReplicaState.WAITING, 0, "127.0.0.1", 1)


def view(version: int, generation: int = 1) -> AllocationView:
    return AllocationView(version, Allocation(generation, 1), None, broken=False, complete=False)


class Script:
    """A service that gives the answers of a list, and then none any more."""

    def __init__(self, *answers: Callable[[], AllocationView], registered: Callable[[], AllocationView]):
        self._answers = list(answers)
        self._registered = registered
        self.asked: list[int | None] = []

    def get_allocation(self, known_version: int | None = None, wait: float = 0.0) -> AllocationView:
        self.asked.append(known_version)
        return self._answers.pop(0)() if self._answers else silence()

    def register(self, registration: Registration) -> AllocationView:
        return self._registered()


def silence() -> AllocationView:
    threading.Event().wait()
    raise AssertionError


def link_to(script: Script) -> Heartbeat:
    link = Heartbeat(script, lambda: None)  # type: ignore[arg-type]
    link.start()
    return link


def test_a_service_that_has_lost_its_data_is_believed() -> None:
    script = Script(lambda: view(7, 3), lambda: view(2), lambda: view(2, 2), registered=silence)
    link = link_to(script)
    wait_until(lambda: script.asked == [None, 7, 2, 2], "three answers")
    assert link.view == view(2, 2), "also where it has come to the same number anew"


def test_an_answer_that_was_overtaken_is_left_aside() -> None:
    asked, heard = threading.Event(), threading.Event()

    def overtaking() -> AllocationView:
        asked.wait()
        return view(7, 3)

    def overtaken() -> AllocationView:
        asked.set()
        heard.wait()
        return view(6)

    script = Script(overtaking, registered=overtaken)
    link = link_to(script)
    told = threading.Thread(target=lambda: link.tell(TOLD, patience=60.0))
    told.start()
    wait_until(lambda: link.view is not None, "the answer that overtakes")
    heard.set()
    told.join(60.0)
    assert link.view == view(7, 3)
