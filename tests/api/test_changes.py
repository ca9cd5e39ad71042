"""Clients that follow the changes of all jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_api.data.database import Database
from adascale_api.data.job import StoredJob
from adascale_api.service.changes import ChangeLog, CursorExpiredError
from adascale_core.messages.job_spec import JobSpec
from adascale_core.rendezvous.rendezvous import Rendezvous
from api.client import Client, ServiceProcess, a_registration, a_report


def ours(answer: Any, *jobs: str) -> tuple[list[Any], list[str]]:
    """The changed and deleted jobs of a test: others share the service."""
    return (
        [job for job in answer["jobs"] if job["id"] in jobs],
        [job for job in answer["deleted"] if job in jobs],
    )


def test_each_change_of_a_job_is_returned_and_a_report_is_none(client: Client, job: str) -> None:
    cursor = client.get("/jobs?limit=1")["cursor"]
    steps: list[Callable[[], object]] = [
        lambda: client.put(f"/jobs/{job}", JobSpec(8, max_replicas=2).to_json()),
        lambda: client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1}),
        lambda: client.register(job, a_registration()),
    ]
    for step in steps:
        step()
        answer = client.get(f"/changes?since={cursor}")
        (changed,), deleted = ours(answer, job)
        assert changed["version"] == client.get(f"/jobs/{job}")["version"]
        assert deleted == []
        cursor = answer["cursor"]
    client.register(job, a_registration())
    client.post_gain(job, a_report(1))
    answer = client.get(f"/changes?since={cursor}")
    assert ours(answer, job) == ([], [])
    assert client.call("DELETE", f"/jobs/{job}").status == 204
    assert ours(client.get(f"/changes?since={cursor}"), job) == ([], [job])


def test_a_waiting_request_is_answered_by_a_change(client: Client, service: ServiceProcess, job: str) -> None:
    cursor = client.get("/jobs?limit=1")["cursor"]

    def follow() -> list[Any]:
        after = cursor
        with Client(service.port) as other:
            while True:
                answer = other.get(f"/changes?since={after}&wait=60")
                changed, _ = ours(answer, job)
                if changed:
                    return changed
                after = answer["cursor"]

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(follow)
        client.put(f"/jobs/{job}", JobSpec(8).to_json())
        assert [each["id"] for each in waiting.result(30)] == [job]


def test_many_changes_are_returned_in_pages(client: Client, job: str) -> None:
    cursor = client.get("/jobs?limit=1")["cursor"]
    names = [f"{job}-{number}" for number in range(5)]
    for name in names:
        client.put(f"/jobs/{name}", JobSpec(8).to_json())
    found: list[str] = []
    while True:
        answer = client.get(f"/changes?since={cursor}&limit=2")
        if not answer["jobs"]:
            break
        assert len(answer["jobs"]) <= 2
        found += [each["id"] for each in ours(answer, *names)[0]]
        cursor = answer["cursor"]
    assert found == names


@pytest.mark.parametrize("cursor", ["", "x", "0-0", "\u0661-\u0661", "a" * 32 + "-1"])
def test_a_cursor_of_another_service_has_expired(client: Client, cursor: str) -> None:
    answer = client.call("GET", f"/changes?since={cursor}&wait=60")
    assert answer.status == 410
    assert "read all jobs again" in answer.body["error"]


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40), st.integers(1, 4))
def test_a_client_misses_no_change_whenever_it_reads(steps: list[tuple[int, bool]], limit: int) -> None:
    log = ChangeLog(max_entries=4)
    state, known = dict.fromkeys(range(7), 0), dict.fromkeys(range(7), 0)
    cursor = log.cursor

    def read() -> None:
        nonlocal cursor
        while True:
            try:
                page = log.since(cursor, limit)
            except CursorExpiredError:
                known.update(state)
                cursor = log.cursor
                return
            if not page:
                return
            for job, _ in page:
                known[int(job)] = state[int(job)]
            cursor = page[-1][1]

    for number, reads in steps:
        state[number] += 1
        log.add(str(number))
        if reads:
            read()
            assert known == state
    read()
    assert known == state


def test_missed_changes_expire_all_cursors_and_wake_who_waits() -> None:
    async def use() -> None:
        log = ChangeLog()
        waiting = asyncio.create_task(log.wait(log.cursor, 60))
        await asyncio.sleep(0)
        log.restart()
        with pytest.raises(CursorExpiredError):
            await waiting
        closing = asyncio.create_task(log.wait(log.cursor, 60))
        await asyncio.sleep(0)
        log.close()
        await closing

    asyncio.run(use())


def test_a_change_elsewhere_is_not_hidden_by_a_read_that_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another service commits, a request here reads and caches the new state, then the notice arrives."""

    async def use() -> None:
        database = Database(f"sqlite:///{tmp_path / 'a.db'}")
        notices: list[Callable[[str, int], None]] = []
        monkeypatch.setattr(database.connector, "listen", lambda on_change, _: notices.append(on_change))
        changed: list[str] = []

        database.listen(lambda job_id, _: changed.append(job_id), lambda: None)
        database.cache.put(StoredJob(1, "a.b", 0.0, 5, None, Rendezvous()))
        notices[0]("a.b", 5)
        await asyncio.sleep(0)
        assert changed == ["a.b"]
        assert database.cached("a.b") is not None
        await database.close()

    asyncio.run(use())
