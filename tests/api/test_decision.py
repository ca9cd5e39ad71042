"""Explained decisions over HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_api.request_models import MAX_DECISION_COUNTS, MAX_DECISION_GIVEN
from adascale_core.explanation import MAX_COUNTS, MAX_GIVING
from adascale_core.messages import JobSpec
from adascale_core.names import MAX_REPLICAS
from adascale_core.views import CountView, DecisionView, GivenReplicas, LimitKind, LimitView, Verdict
from api.client import Client, a_report
from api.test_messages import as_lists


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
