"""The body of a report."""

import json
from dataclasses import fields

from pydantic import TypeAdapter

from adascale_api.bodies import GainReportBody
from adascale_api.http.request_body import reports_body
from adascale_api.routes.gain import GainResponse
from adascale_core.messages.reports import GainReport
from api.client import a_report

ADAPTER = TypeAdapter(GainReportBody)


def test_a_parsed_report_is_the_message_with_its_defaults() -> None:
    required = {name: value for name, value in a_report(7).to_json().items() if value not in (None, {}, "")}
    (parsed,) = reports_body.parse(json.dumps(required).encode())
    assert parsed == GainReport(**required)


def test_the_schemas_describe_each_field_of_a_report() -> None:
    names = [field.name for field in fields(GainReport)]
    properties = ADAPTER.json_schema()["properties"]
    assert properties["epoch"]["description"] == "The present epoch, from 0."
    assert all(properties[name]["description"] for name in names)
    assert set(names) < set(GainResponse.model_json_schema()["properties"])
