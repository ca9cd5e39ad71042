"""The JSON of the service has the fields of the core's messages, so that the client can parse it."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from pydantic import BaseModel

from adascale_api.bodies import (
    AllocationBody,
    CountBody,
    DecisionBody,
    GainReportBody,
    GivenReplicasBody,
    JobSpecBody,
    LimitBody,
    RegistrationBody,
)
from adascale_api.http.request_body import reports_body
from adascale_core.messages import Message
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Heartbeat
from adascale_core.messages.reports import GainReport
from adascale_core.views.decision import CountView, DecisionView, GivenReplicas, LimitView
from adascale_core.views.gain import GainView
from adascale_core.views.jobs import JobList, JobView
from api.client import Client, a_registration, a_report


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GainReportBody, GainReport),
        (JobSpecBody, JobSpec),
        (AllocationBody, Allocation),
        (RegistrationBody, Heartbeat),
        (DecisionBody, DecisionView),
        (CountBody, CountView),
        (LimitBody, LimitView),
        (GivenReplicasBody, GivenReplicas),
    ],
)
def test_a_request_body_has_the_fields_of_its_message(body: type[BaseModel], message: type[Message]) -> None:
    names = {field.name for field in fields(message)}  # type: ignore[arg-type]  # every message is a dataclass
    if message is JobSpec:
        names.remove("local_bsz_limit")  # The service sets it.
    assert body.model_fields.keys() == names
    assert all(field.description for field in body.model_fields.values())


def test_an_answer_has_exactly_the_fields_of_its_view(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}", JobSpec(8, max_replicas=2).to_json())
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
    client.register(job, a_registration())
    client.post_gain(job, a_report(step_time=0.01))
    gain = client.get(f"/jobs/{job}/gain")
    assert GainView.from_json(gain).to_json() == gain
    assert gain["predictions"]
    answer = client.get(f"/jobs/{job}")
    assert as_lists(JobView.from_json(answer).to_json()) == answer
    page = client.get("/jobs?limit=1000")
    assert as_lists(JobList.from_json(page).to_json()) == page


def test_a_parsed_report_is_the_message_with_its_defaults() -> None:
    required = {name: value for name, value in a_report(7).to_json().items() if value not in (None, {}, "")}
    assert reports_body.parse(json.dumps(required).encode()) == [GainReport(**required)]


def as_lists(value: object) -> object:
    """The value with lists for tuples, as JSON has it."""
    if isinstance(value, dict):
        return {name: as_lists(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [as_lists(member) for member in value]
    return value
