"""`adascale validate`."""

from __future__ import annotations

from rich.console import Console

from adascale_controller.cli.arguments import JobFile
from adascale_controller.deadline_summary import describe_deadline
from adascale_controller.jobfile import load_job
from adascale_controller.valid_replicas import render_valid_replicas
from adascale_core.placement.replica_gpus import describe_unused_gpus


def validate(file: JobFile) -> None:
    """Check a job file; show its errors and warnings, and the replica counts that the job may run on."""
    job = load_job(file)
    console = Console(highlight=False)
    console.print(f"{file}: {job.id} is valid\n", markup=False, soft_wrap=True)
    warning = describe_unused_gpus(job.gpus, job.spec.processes_per_replica)
    if warning is not None:
        console.print(f"Warning: {warning}\n", markup=False, soft_wrap=True)
    console.print(render_valid_replicas(job))
    deadline = describe_deadline(job)
    if deadline is not None:
        console.print(f"\n{deadline}", markup=False, soft_wrap=True)
