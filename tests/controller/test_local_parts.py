"""The small parts of a local run that need no process."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from adascale_controller.job import CheckpointSettings, Job
from adascale_controller.local import checkpoints, machine
from adascale_controller.local.generations import Span, summarize
from adascale_controller.local.local_command import LocalCommandError, resolve_command
from adascale_controller.local.processes import tail
from adascale_controller.local.service_process import PortTakenError, choose_port
from adascale_controller.measurements import DEFAULT_DOWNTIME, DEFAULT_PREPARATION, JobMeasurements
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.messages import ActiveAllocation, Allocation, GainReport, JobSpec, StepTime
from adascale_core.views import JobView

REPORT = GainReport(
    generation=1, step=10, progress=10.0, epoch=0, replicas=1, local_bsz=4, accumulation=1, scale=1.0,
    gain=1.0, grad_sqr=0.1, grad_var=0.9, step_time=0.01, time=100.0, loss=0.5,
)  # fmt: skip
JOB = Job("default.digits", JobSpec(4, 64, (4, 16), 1, 4, 1000), command=("python", "-c", "pass"))


def view(generation: int, latest: GainReport | None, desired: int | None = None) -> JobView:
    return replace(
        JobView.empty(JOB.id),
        desired=Allocation(desired or generation, 1),
        active=ActiveAllocation(generation, 1, "127.0.0.1", 1),
        latest=latest,
        step_times=(StepTime(1, 4, 1, 0.01), StepTime(2, 8, 1, 0.02)),
    )


# -- observation -----------------------------------------------------------------------------------------


def test_a_count_is_settled_once_its_generation_reports() -> None:
    observed = JobMeasurements()
    assert observed.update(view(1, None), 5.0) is None
    assert observed.job_state(JOB, view(1, None), 1000).stable_since is None
    assert observed.update(view(1, REPORT), 6.0) == REPORT
    assert observed.update(view(1, replace(REPORT, step=11)), 7.0) is None
    state = observed.job_state(JOB, view(1, REPORT), 1000)
    assert (state.stable_since, state.remaining, state.largest) == (6.0, 990.0, 2)
    assert state.restart_seconds == DEFAULT_DOWNTIME


def test_a_count_is_not_settled_while_another_is_wanted() -> None:
    observed = JobMeasurements()
    observed.update(view(1, REPORT), 6.0)
    assert observed.job_state(JOB, view(1, REPORT, desired=2), 1000).stable_since is None
    assert observed.job_state(JOB, replace(view(1, REPORT), broken=True), 1000).stable_since is None


def test_a_restart_costs_what_restarts_have_cost() -> None:
    observed = JobMeasurements()
    observed.update(view(1, REPORT), 6.0)
    observed.update(view(1, replace(REPORT, step=15, time=105.0)), 7.0)
    observed.update(view(2, replace(REPORT, step=20, time=110.0)), 7.1)
    observed.update(view(2, replace(REPORT, generation=2, step=31, time=112.1)), 8.0)
    assert observed.last_downtime == pytest.approx(2.0)
    observed.update(view(3, replace(REPORT, generation=3, step=32, time=116.1)), 9.0)
    assert observed.job_state(JOB, view(3, REPORT), None).restart_seconds == pytest.approx(3.0)


def test_a_preparation_lasts_from_the_decision_to_the_standstill() -> None:
    observed = JobMeasurements()
    observed.update(view(1, REPORT), 6.0)
    assert observed.job_state(JOB, view(1, REPORT), None).prepare_seconds == DEFAULT_PREPARATION
    observed.update(view(1, REPORT, desired=2), 10.0)
    observed.update(view(1, replace(REPORT, time=114.0), desired=2), 15.0)
    observed.update(view(2, replace(REPORT, generation=2, step=11, time=115.0)), 16.0)
    assert observed.last_downtime == pytest.approx(1.0)
    assert observed.job_state(JOB, view(2, REPORT), None).prepare_seconds == pytest.approx(5.0)


def test_what_a_loss_costs_is_no_measure_of_a_restart() -> None:
    observed = JobMeasurements()
    observed.update(view(1, REPORT), 6.0)
    observed.update(replace(view(2, replace(REPORT, generation=2, time=190.0)), disruptions=1), 8.0)
    assert observed.last_downtime == 90.0
    assert observed.job_state(JOB, view(2, REPORT), None).restart_seconds == DEFAULT_DOWNTIME


def test_what_former_runs_reported_is_no_sign_of_life() -> None:
    observed = JobMeasurements()
    observed.ignore_before(2)
    assert observed.update(view(1, REPORT), 6.0) is None
    assert observed.job_state(JOB, view(1, REPORT), 1000).stable_since is None
    assert observed.update(view(2, replace(REPORT, generation=2, time=900.0)), 7.0) is not None
    assert observed.last_downtime is None


# -- generations -----------------------------------------------------------------------------------------


def at(generation: int, step: int, progress: float, time: float, **other: float) -> GainReport:
    return replace(REPORT, generation=generation, step=step, progress=progress, time=time, **other)  # type: ignore[arg-type]


def test_a_generation_is_summed_up_from_its_first_report_to_its_last() -> None:
    (first, second) = summarize(
        [
            at(1, 1, 1.0, 100.0),
            at(1, 100, 100.0, 110.0),
            at(2, 101, 102.0, 112.5, replicas=2, scale=4.0, gain=2.0, local_bsz=8, step_time=0.1),
            at(2, 201, 402.0, 122.5, replicas=2, scale=8.0, gain=4.0, local_bsz=16, step_time=0.1),
        ]
    )
    assert (first.steps, first.gain, first.downtime) == (100, 1.0, None)
    assert first.seconds == pytest.approx(10.01)
    assert (second.replicas, second.local_bsz, second.scale) == (2, Span(8, 16), Span(4.0, 8.0))
    assert (second.steps, second.gain, second.efficiency) == (101, 3.0, 0.5)
    assert (second.downtime, second.repeated) == (2.5, 0)
    assert second.seconds == pytest.approx(10.1)


def test_steps_made_again_after_a_loss_are_told() -> None:
    (_, second) = summarize([at(1, 1, 1.0, 100.0), at(1, 90, 90.0, 110.0), at(2, 51, 51.0, 112.0)])
    assert second.repeated == 40


def test_the_time_between_two_runs_is_no_downtime() -> None:
    reports = [at(1, 1, 1.0, 100.0), at(2, 2, 2.0, 500.0)]
    assert summarize(reports, runs=[90.0])[1].downtime == 400.0
    assert summarize(reports, runs=[90.0, 498.0])[1].downtime is None


def test_nothing_reported_is_nothing_to_sum_up() -> None:
    assert summarize([]) == []


# -- the program -----------------------------------------------------------------------------------------


def test_python_is_the_interpreter_that_runs_us(tmp_path: Path) -> None:
    program = resolve_command(JOB, tmp_path, {"PATH": "/bin"}, threads=2)
    assert program.command == (sys.executable, "-c", "pass")
    assert program.environ["PATH"] == f"{Path(sys.executable).parent}:/bin"


def test_the_trainer_is_told_of_the_job_by_its_environment(tmp_path: Path) -> None:
    told = resolve_command(JOB, tmp_path, {}, threads=2).environ
    assert {name: value for name, value in told.items() if name.startswith("ADASCALE_")} == {
        "ADASCALE_BATCH_SIZE": "4",
        "ADASCALE_MAX_BATCH_SIZE": "64",
        "ADASCALE_LOCAL_BSZ_BOUNDS": "4,16",
        "ADASCALE_EFFICIENCY_TARGET": "0.5",
        "ADASCALE_SCALE_INVARIANT_STEPS": "1000",
        "ADASCALE_CHECKPOINT_INTERVAL": "30.0",
        "ADASCALE_CHECKPOINT_DIR": str(tmp_path),
    }


def test_threads_are_shared_out_unless_the_user_has(tmp_path: Path) -> None:
    assert resolve_command(JOB, tmp_path, {}, threads=2).environ["OMP_NUM_THREADS"] == "2"
    assert resolve_command(JOB, tmp_path, {"OMP_NUM_THREADS": "7"}, 2).environ["OMP_NUM_THREADS"] == "7"


def test_references_are_resolved_as_a_cluster_does(tmp_path: Path) -> None:
    job = replace(
        JOB,
        command=("python", "-c", "$(WHO) $(ADASCALE_BATCH_SIZE) $(UNKNOWN) $$(WHO) $WHO"),
        env={"WHO": "me", "PATH_TO": "$(WHO)/x"},
    )
    program = resolve_command(job, tmp_path, {}, 1)
    assert program.command[2] == "me 4 $(UNKNOWN) $(WHO) $WHO"
    assert program.environ["PATH_TO"] == "me/x"


def test_a_working_directory_of_the_image_is_told_to_be_left_out(tmp_path: Path) -> None:
    here = resolve_command(replace(JOB, working_dir=str(tmp_path)), tmp_path, {}, 1)
    assert (here.cwd, here.ignored) == (tmp_path, ())
    absent = resolve_command(replace(JOB, working_dir="/no/such/app"), tmp_path, {}, 1)
    assert absent.cwd == Path.cwd()
    assert absent.ignored[0].startswith("the working directory /no/such/app, which is not on this machine")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ((), "job digits names no program: give the container 'worker' of spec.template a command"),
        (("no-such-program",), "the program 'no-such-program' of the job's command is not there"),
        (("./no-such-program",), "the program './no-such-program' of the job's command is not there"),
        (("python", "no/such.py"), "the script 'no/such.py' of the job's command is not in "),
    ],
)
def test_a_program_that_is_not_there_is_told_before_anything_starts(
    tmp_path: Path, command: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(LocalCommandError) as raised:
        resolve_command(replace(JOB, command=command), tmp_path, {}, 1)
    assert str(raised.value).startswith(complaint)
    assert raised.value.exit_code == 2


# -- the machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2,0", ["2", "0"]),
        ("0,-1,1", ["0"]),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_gpus_are_those_that_the_user_lets_us_see(visible: str, devices: list[str]) -> None:
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": visible}) == devices


def test_a_gpu_holds_a_replica_and_a_cpu_at_least_four() -> None:
    assert machine.default_capacity(["0", "1"]) == 2
    assert machine.default_capacity([]) >= machine.MIN_ON_CPU


# -- checkpoints -----------------------------------------------------------------------------------------


def test_the_newest_checkpoint_tells_where_a_job_stands(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoints.newest(folder) is None
    folder.mkdir()
    manifest = Manifest(10, "00ff", 12, 70, 12.5, 0, 1, 1, finished=True, result={"accuracy": 0.9})
    (folder / "checkpoint-00000009.json").write_text(json.dumps(replace(manifest, number=9).to_json()))
    (folder / "checkpoint-00000010.json").write_text(json.dumps(manifest.to_json()))
    (folder / "checkpoint-00000011.pt").touch()
    assert checkpoints.newest(folder) == manifest
    (folder / "checkpoint-00000012.json").write_text("{")
    assert checkpoints.newest(folder) == manifest


# -- the rest --------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_given_up_only_if_nobody_asked_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert choose_port(port, insist=False) == 0
        with pytest.raises(
            PortTakenError, match=f"port {port} can't be used: address already in use"
        ) as raised:
            choose_port(port, insist=True)
        assert raised.value.exit_code == 2


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert tail(log, 2) == "line 998\nline 999"


def test_checkpoints_go_where_the_job_says(tmp_path: Path) -> None:
    job = replace(JOB, checkpoint=CheckpointSettings(interval_seconds=2.5))
    assert resolve_command(job, tmp_path, {}, 1).environ["ADASCALE_CHECKPOINT_INTERVAL"] == "2.5"
