"""Views are equal after a round trip through JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_core.messages import Message
from adascale_core.messages.reports import GainReport
from adascale_core.views.decision import LimitKind, LimitView
from adascale_core.views.gain import GainView, HistoryView, StoredReports
from adascale_core.views.jobs import JobChanges, JobList, JobView, ReplicaView
from support.examples import examples

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

# The scale of a report is positive: the efficiency divides by it.
st.register_type_strategy(GainReport, st.builds(GainReport, scale=st.floats(1e-9, 1e9)))

views: st.SearchStrategy[Message] = st.one_of(
    *(st.from_type(view) for view in (StoredReports, GainView, HistoryView, ReplicaView)),
    *(st.from_type(view) for view in (JobView, JobList, JobChanges)),
)


@given(views)
def test_a_view_is_equal_after_a_round_trip_through_json(view: Message) -> None:
    text = json.dumps(view.to_json())
    assert json.dumps(type(view).from_json(json.loads(text)).to_json()) == text


@settings(max_examples=examples(30))
@given(views)
def test_unknown_members_are_ignored(view: Message) -> None:
    text = json.dumps(view.to_json())
    assert json.dumps(type(view).from_json({**json.loads(text), "new_member": 1}).to_json()) == text


def test_the_view_of_an_unknown_job_is_empty() -> None:
    view = JobView.empty("default.digits")
    assert (view.id, view.generation, view.replica(0)) == ("default.digits", 0, None)
    assert JobView.from_json(json.loads(json.dumps(view.to_json()))) == view


def test_a_limit_of_a_kind_of_a_later_version_keeps_its_reason() -> None:
    limit = LimitView.from_json({"kind": "of the next version", "reason": "for a reason"})
    assert limit == LimitView(LimitKind.OTHER, "for a reason")
    assert LimitView.from_json(limit.to_json()) == limit
