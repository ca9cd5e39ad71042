"""Explained decisions over HTTP."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from adascale_api.app import create_app
from adascale_api.bodies import MAX_DECISION_COUNTS, MAX_DECISION_GIVEN
from adascale_api.data.database import Database
from adascale_api.service.service import Settings
from adascale_core.decision.explanation import MAX_COUNTS, MAX_GIVING
from adascale_core.messages.job_spec import JobSpec
from adascale_core.names import API_AUDIENCE, MAX_REPLICAS, job_audience
from adascale_core.views.decision import CountView, DecisionView, GivenReplicas, LimitKind, LimitView, Verdict
from api.client import Client, a_report
from api.test_messages import as_lists
from api.test_token_review import OPERATOR, WORKER, Cluster, a_token


def a_decision(job: str, **changed: Any) -> DecisionView:
    decision = DecisionView(
        job=job,
        replicas=2,
        present=1,
        waiting=False,
        reason="grows",
        time=1.76e9,
        counts=(
            CountView(1, 10.0, 50.0, (), Verdict.NOT_WORTH, "not faster"),
            CountView(2, 19.5, None, (GivenReplicas("default.other", 1),), Verdict.CHOSEN, "chosen"),
        ),
        limits=(LimitView(LimitKind.CAPACITY, "0 of 2 replicas are free"),),
    )
    return replace(decision, **changed)


def test_the_last_decision_is_returned(client: Client, job: str) -> None:
    client.call("PUT", f"/jobs/{job}", JobSpec(8, max_replicas=2).to_json())
    full = f"default.{job}" if "." not in job else job
    for decision in (a_decision(full, replicas=1), a_decision(full)):
        answer = client.call("PUT", f"/jobs/{job}/decision", decision.to_json())
        assert answer.status == 204, answer.body
    stored = client.get(f"/jobs/{job}/decision")
    assert DecisionView.from_json(stored) == a_decision(full)
    assert as_lists(DecisionView.from_json(stored).to_json()) == stored
    version = client.get(f"/jobs/{job}/allocation")["version"]
    client.call("PUT", f"/jobs/{job}/decision", a_decision(full).to_json())
    assert client.get(f"/jobs/{job}/allocation")["version"] == version, "it does not wake the agents"


def test_a_job_without_a_decision_says_so(client: Client, job: str) -> None:
    client.post_gain(job, a_report())
    answer = client.call("GET", f"/jobs/{job}/decision")
    assert answer.status == 404
    assert "there is no decision about job" in answer.body["error"]


def test_a_decision_creates_no_job(client: Client, job: str) -> None:
    assert client.call("PUT", f"/jobs/{job}/decision", a_decision(job).to_json()).status == 404
    assert client.call("GET", f"/jobs/{job}").status == 404


def test_a_decision_is_deleted_with_its_job(client: Client, job: str) -> None:
    spec = JobSpec(8, max_replicas=2).to_json()
    client.call("PUT", f"/jobs/{job}", spec)
    client.call("PUT", f"/jobs/{job}/decision", a_decision(job).to_json())
    client.call("DELETE", f"/jobs/{job}")
    client.call("PUT", f"/jobs/{job}", spec)
    assert client.call("GET", f"/jobs/{job}/decision").status == 404


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"job": "default.someone-else"}, "job"),
        ({"replicas": MAX_REPLICAS + 1}, "replicas"),
        ({"reason": "x" * 501}, "reason"),
        ({"counts": [a_decision("x").counts[0].__dict__] * (MAX_DECISION_COUNTS + 1)}, "counts"),
    ],
)
def test_an_invalid_decision_is_refused(
    client: Client, job: str, changed: dict[str, object], field: str
) -> None:
    client.call("PUT", f"/jobs/{job}", JobSpec(8, max_replicas=2).to_json())
    answer = client.call("PUT", f"/jobs/{job}/decision", {**a_decision(job).to_json(), **changed})
    assert answer.status == 422
    assert answer.body["error"].startswith(field)


def test_the_service_accepts_every_size_of_explanation() -> None:
    assert MAX_COUNTS <= MAX_DECISION_COUNTS
    assert MAX_GIVING <= MAX_DECISION_GIVEN


async def ask(app: FastAPI, path: str, audience: str | None, body: object = None) -> tuple[int, Any]:
    """Return status and body of the answer to a GET, or to a PUT of `body`, without a server."""
    token = [] if audience is None else [(b"authorization", f"Bearer {a_token(audience)}".encode())]
    scope = {
        "type": "http",
        "method": "GET" if body is None else "PUT",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"service"), (b"content-type", b"application/json"), *token],
        "app": app,
    }
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in messages)
    return messages[0]["status"], json.loads(content or b"null")


def test_the_token_of_a_job_does_not_show_other_jobs_where_reads_are_protected(tmp_path: Path) -> None:
    job = "team-a.digits"
    path = f"/jobs/{job}/decision"
    stored: Any = as_lists(a_decision(job).to_json())
    cluster = Cluster()

    async def read(*, protect_reads: bool) -> Any:
        database = Database(f"sqlite:///{tmp_path / 'service.db'}")
        app = create_app(database, cluster.authorizer, Settings(protect_reads=protect_reads))
        async with app.router.lifespan_context(app):
            cluster.user = OPERATOR
            await ask(app, f"/jobs/{job}", API_AUDIENCE, JobSpec(8, max_replicas=2).to_json())
            assert (await ask(app, path, API_AUDIENCE, stored))[0] == 204
            assert await ask(app, path, API_AUDIENCE) == (200, stored)
            assert (await ask(app, path, None))[0] == (401 if protect_reads else 200)
            cluster.user = WORKER
            status, seen = await ask(app, path, job_audience(job))
            assert status == 200
            return seen

    assert asyncio.run(read(protect_reads=False)) == stored
    seen = asyncio.run(read(protect_reads=True))
    assert "default.other" not in json.dumps(seen)
    assert seen["counts"][1]["given"] == [{"job": "other jobs", "replicas": 1}]
    seen["counts"][1]["given"] = stored["counts"][1]["given"]
    assert seen == stored
