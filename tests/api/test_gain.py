"""Reports over HTTP: each is stored once, and read with its predictions."""

from typing import Any

import pytest

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import valid_replicas
from adascale_core.messages.allocation import AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.performance.goodput_table import predict
from adascale_core.performance.throughput import StepTimeModel
from api.client import Client, ServiceProcess, a_report

SPEC = JobSpec(8, max_batch_size=64, local_bsz_bounds=(4, 32), min_replicas=1, max_replicas=6)


def test_the_first_report_creates_a_job(client: Client, job: str) -> None:
    answer = client.post_gain(job, a_report())
    assert (answer["stored"], answer["repeated"]) == (1, 0)
    assert AllocationView.from_json(answer["allocation"]).desired is None
    assert GainReport.from_json(client.get(f"/jobs/{job}/gain")) == a_report()


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": None},
        {"counts_samples": True},
        {"slow_replica": 1, "slow_factor": 1.25},
        {"metrics": {"accuracy": 0.9, "_lr": -1.5e-9}},
    ],
)
def test_the_fields_of_a_report_are_in_the_gain_the_job_and_the_history(
    client: Client, job: str, fields: dict[str, Any]
) -> None:
    first, second = a_report(1), a_report(2, **fields)
    optional = {name: value for name, value in first.to_json().items() if name not in fields}
    assert client.call("POST", f"/jobs/{job}/gain", optional).status == 200
    client.post_gain(job, second)
    answers = client.get(f"/jobs/{job}/gain"), client.get(f"/jobs/{job}")["latest"]
    history = client.get(f"/jobs/{job}/gain/history")["points"]
    assert [GainReport.from_json(each) for each in (*answers, history[-1])] == [second] * 3
    without = {name: getattr(first, name) for name in fields if name != "loss"}
    assert {name: history[0][name] for name in without} == without


def test_metrics_are_shown_without_a_token_whatever_their_names(service: ServiceProcess, job: str) -> None:
    metrics = {"instances": 5.0, "port": 2.0, "node": 1.0, "loss_of_key": 0.5}
    with Client(service.port) as client, Client(service.port, token=None) as anyone:
        client.post_gain(job, a_report(metrics=metrics))
        assert anyone.get(f"/jobs/{job}")["latest"]["metrics"] == metrics
        (listed,) = anyone.get(f"/jobs?limit=1&after={job[:-1]}")["jobs"]
    assert listed["latest"]["metrics"] == metrics


def test_a_name_alone_means_the_namespace_default(client: Client) -> None:
    client.post_gain("bare-name", a_report())
    assert client.get("/jobs/default.bare-name/gain")["job"] == "default.bare-name"


def test_the_gain_comes_with_its_efficiency(client: Client, job: str) -> None:
    client.post_gain(job, a_report(gain=3.0, scale=4.0))
    assert client.get(f"/jobs/{job}/gain")["efficiency"] == 0.75


def test_predictions_need_a_declaration(client: Client, job: str) -> None:
    client.post_gain(job, a_report())
    assert client.get(f"/jobs/{job}/gain")["predictions"] is None
    client.put(f"/jobs/{job}", SPEC.to_json())
    assert client.get(f"/jobs/{job}/gain")["predictions"]


def test_predictions_need_a_step_time(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}", SPEC.to_json())
    client.post_gain(job, a_report(step_time=0.0))
    assert client.get(f"/jobs/{job}/gain")["predictions"] is None


def test_the_predictions_are_those_of_the_core(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}", SPEC.to_json())
    client.post_gain(
        job,
        *[a_report(step, step_time=0.01 * step) for step in (1, 2, 3)],
        a_report(4, local_bsz=16, scale=8.0, step_time=0.04, grad_sqr=0.25, grad_var=3.0, grad_sqr_error=0.1),
    )
    measured = [StepTime(2, 8, 1, 0.02, 3), StepTime(2, 16, 1, 0.04, 1)]
    model = StepTimeModel.fit(measured)
    assert model is not None
    client.post_gain(job, a_report(3, generation=1, local_bsz=16, step_time=9.0, accelerator="another type"))
    estimate = GradientEstimate(0.25, 3.0, grad_sqr_error=0.1)
    expected = predict(SPEC.bounds, valid_replicas(SPEC.bounds, 6), estimate, model)
    assert all(each.gain_range[0] < each.gain_range[1] for each in expected if each.scale > 1.0)
    assert client.get(f"/jobs/{job}/gain")["predictions"] == [
        {
            "replicas": prediction.plan.replicas,
            "local_bsz": prediction.plan.local_bsz,
            "accumulation": prediction.plan.accumulation,
            "scale": prediction.scale,
            "gain": prediction.gain,
            "efficiency": prediction.efficiency,
            "step_time": prediction.step_time,
            "goodput": prediction.goodput,
            "gain_low": prediction.gain_range[0],
            "gain_high": prediction.gain_range[1],
        }
        for prediction in expected
    ]


def test_the_history_has_at_most_the_requested_points(client: Client, job: str) -> None:
    client.post_gain(job, *[a_report(step) for step in range(1, 502)])
    assert len(client.get(f"/jobs/{job}/gain/history")["points"]) == 500
    steps = [point["step"] for point in client.get(f"/jobs/{job}/gain/history?points=3")["points"]]
    assert (len(steps), steps[0], steps[-1]) == (3, 1, 501)


def test_the_answer_to_a_report_has_the_active_allocation(client: Client, job: str) -> None:
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 2})
    allocation = client.post_gain(job, a_report())["allocation"]
    assert allocation == client.get(f"/jobs/{job}/allocation")
    assert allocation["desired"] == {"generation": 1, "replicas": 2, "spares": 0, "failed": False}


def test_what_does_not_fit_into_memory_limits_predictions_and_the_next_generation(
    client: Client, job: str
) -> None:
    spec = JobSpec(8, max_batch_size=64, local_bsz_bounds=(4, 32), max_replicas=2)
    client.put(f"/jobs/{job}", spec.to_json())
    client.put(f"/jobs/{job}/allocation", {"generation": 1, "replicas": 1})
    members = {"instance": "a.1", "address": "127.0.0.1", "port": 4000, "accelerator": "cpu", "replica": 0}
    replica = f"/jobs/{job}/replicas/0"
    client.put(replica, {**members, "state": "waiting", "generation": 0})
    running = {**members, "state": "running", "generation": 1, "assigned": 1, "rank": 0, "replicas": 1}
    client.put(replica, {**running, "stepped": 1})
    client.post_gain(job, a_report(1, replicas=1, accumulation=1, scale=1.0, grad_sqr=0.01, grad_var=1.0))
    assert client.get(f"/jobs/{job}/gain")["local_bsz_limit"] is None
    answer = client.put(
        replica, {**running, "state": "holding", "step": 3, "stepped": 1, "local_bsz_limit": 6}
    )
    assert answer["active"]["generation"] == 2
    assert answer["active"]["spec"]["local_bsz_limit"] == 6
    view = client.get(f"/jobs/{job}")
    assert (view["local_bsz_limit"], view["disruptions"]) == (6, 0)
    assert view["local_bsz_limits"] == [{"accelerator": "cpu", "local_bsz": 6}]
    gain = client.get(f"/jobs/{job}/gain")
    assert gain["local_bsz_limit"] == 6
    assert [each["local_bsz"] <= 6 for each in gain["predictions"]] == [True, True]
    measured_elsewhere = a_report(
        2, replicas=1, accumulation=1, scale=1.0, grad_sqr=0.01, accelerator="NVIDIA-H200"
    )
    client.post_gain(job, measured_elsewhere)
    gain = client.get(f"/jobs/{job}/gain")
    assert gain["local_bsz_limit"] is None, "the predictions are about the type that was measured"
    assert [each["local_bsz"] > 6 for each in gain["predictions"]] == [True, True]
