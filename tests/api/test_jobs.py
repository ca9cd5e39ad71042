"""Jobs over HTTP: declared, listed, read and deleted."""

from typing import Any

from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import StepTime
from api.client import Client, a_registration, a_report


def test_a_second_declaration_replaces_the_first(client: Client, job: str) -> None:
    first = client.call("PUT", f"/jobs/{job}", JobSpec(8, max_replicas=4).to_json())
    assert first.status == 201
    edited = JobSpec(8, 64, (4, 16), 1, 4, 12_000, 0.7)
    second = client.call("PUT", f"/jobs/{job}", edited.to_json())
    assert second.status == 200
    assert JobSpec.from_json(client.get(f"/jobs/{job}")["spec"]) == edited


def test_a_refused_declaration_changes_nothing(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}", JobSpec(8).to_json())
    assert client.call("PUT", f"/jobs/{job}", {"batch_size": 8, "max_batch_size": 4}).status == 422
    assert JobSpec.from_json(client.get(f"/jobs/{job}")["spec"]) == JobSpec(8)


def test_a_job_is_read_with_its_generations_replicas_and_reports(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}", JobSpec(8, max_replicas=2, max_batch_size=32).to_json())
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
    client.register(job, a_registration())
    running = a_registration(state=ReplicaState.RUNNING, generation=1)
    client.register(job, running)
    times = [0.03, 0.01, 0.02, 0.0]
    client.post_gain(job, *[a_report(step, step_time=time) for step, time in enumerate(times)])
    stored = client.get(f"/jobs/{job}")
    assert stored["id"] == job
    assert stored["desired"] == {"generation": 1, "replicas": 1, "spares": 0, "failed": False}
    assert stored["active"]["members"][0]["port"] == 40000
    assert (stored["broken"], stored["complete"], stored["failures"], stored["disruptions"]) == (
        False,
        False,
        0,
        0,
    )
    assert stored["version"] == client.get(f"/jobs/{job}/allocation")["version"]
    assert [StepTime.from_json(step_time) for step_time in stored["step_times"]] == [
        StepTime(2, 8, 1, 0.02, 3)
    ]
    assert stored["latest"]["step"] == 3
    replica = stored["replicas"][0]
    assert 0 <= replica.pop("seconds_since_heartbeat") < 60
    assert Registration.from_json(replica) == running


def test_the_failure_of_a_replica_is_stored_with_its_log(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
    client.register(job, a_registration())
    failed = a_registration(
        state=ReplicaState.FAILED, generation=1, exit_code=1, log="ValueError: äöü \U0001f600"
    )
    client.register(job, failed)
    stored = client.get(f"/jobs/{job}")
    assert stored["failures"] == 1
    assert stored["replicas"][0]["log"] == failed.log


def test_the_pages_of_the_job_list_have_every_job_once(client: Client) -> None:
    ids = [f"pages.job-{number}" for number in range(7)]
    for job_id in ids:
        client.put(f"/jobs/{job_id}", JobSpec(8).to_json())
    listed: list[dict[str, Any]] = []
    after: str | None = "pages."
    while after is not None:
        page = client.get(f"/jobs?limit=3&after={after}")
        assert len(page["jobs"]) <= 3
        listed += page["jobs"]
        after = page["next"]
    ours = [each for each in listed if each["id"].startswith("pages.")]
    assert ours == [client.get(f"/jobs/{job_id}") for job_id in ids]


def test_a_deleted_job_can_be_created_again(client: Client, job: str) -> None:
    client.post_gain(job, a_report(1), a_report(2))
    client.register(job, a_registration())
    before = client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})["version"]
    deleted = client.call("DELETE", f"/jobs/{job}")
    assert (deleted.status, deleted.body) == (204, "")
    assert client.call("GET", f"/jobs/{job}").status == 404
    assert client.post_gain(job, a_report(2))["stored"] == 1
    stored = client.get(f"/jobs/{job}")
    assert stored["replicas"] == []
    assert stored["version"] > before
    assert client.get(f"/jobs/{job}/gain/history")["total"] == 1
