"""Tests of the end of a process whose main thread stays in a collective call that has failed."""

import subprocess

import pytest
import torch

from adascale_core.failures import EXIT_PEER_LOST, EXIT_REENTRY
from support.fast_python import PYTHON

PROGRAM = """
import os, sys, tempfile, threading, time
import torch
import torch.distributed as dist
from types import SimpleNamespace
from adascale_worker.loop import failures

failures.POLL_INTERVAL, failures._MAX_CPU_TIME = 0.05, 0.001
store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 2)


def end_otherwise():
    time.sleep(3 * failures.POLL_INTERVAL * failures.CHECKS)
    os._exit(5)


def watch(over, save):
    group = SimpleNamespace(
        has_failed=not over, is_forming=False, processes=1, generation=1, peer_timeout=5.0,
        own=SimpleNamespace(find_frozen=lambda checks: None),
    )
    state = SimpleNamespace(save_beside=save)
    failures.Failures(SimpleNamespace(group=group, state=state, device=torch.device("cpu"))).start()

threading.Thread(target=end_otherwise, daemon=True).start()
"""
WAITS = """
parent = os.getpid()
if os.fork() == 0:
    # This peer never calls a collective.
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)
dist.init_process_group("gloo", store=store, rank=0, world_size=2)
watch({over}, lambda: {saved})
dist.all_reduce(torch.zeros(1))
"""
COMPUTES = """
watch(False, lambda: True)
x = torch.ones(300, 300, requires_grad=True)
while True:
    y = x
    for _ in range(400):
        y = y @ x * 1e-3
    y.sum().backward()
"""
WAITS_FOR_A_GPU = """
# A stream's method that waits for a kernel, and uses the processor meanwhile without holding the GIL.
method = "import hashlib\\ndef synchronize(): hashlib.pbkdf2_hmac('sha256', b'', b'', {iterations})"
module = {{"__name__": {module!r}}}
exec(method, module)
watch(False, lambda: True)
while True:
    module["synchronize"]()
"""
LONG = 2**31 - 1
STREAM, EVENT = torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize
SLEEPS = """
watch(False, lambda: True)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main_thread", "code"),
    [
        (WAITS.format(over="False", saved="True"), EXIT_REENTRY),
        (WAITS.format(over="False", saved="False"), EXIT_PEER_LOST),
        (WAITS.format(over="False", saved="1 / 0"), EXIT_PEER_LOST),
        (WAITS.format(over="True", saved="True"), 5),
        (WAITS_FOR_A_GPU.format(module=STREAM.__module__, iterations=LONG), EXIT_REENTRY),
        (WAITS_FOR_A_GPU.format(module=EVENT.__module__, iterations=LONG), EXIT_REENTRY),
        (WAITS_FOR_A_GPU.format(module=STREAM.__module__, iterations=5000), 5),
        (WAITS_FOR_A_GPU.format(module="torch.autograd", iterations=LONG), 5),
        (COMPUTES, 5),
        (SLEEPS, 5),
    ],
    ids=[
        "saves",
        "has nothing to save",
        "cannot save",
        "waits in a newer generation",
        "waits for a stream",
        "waits for an event",
        "waits for a stream again and again",
        "uses the processor",
        "computes",
        "waits elsewhere",
    ],
)
def test_a_process_ends_if_its_main_thread_stays_in_a_collective_call(main_thread: str, code: int) -> None:
    ended = subprocess.run(
        [*PYTHON, "-c", PROGRAM + main_thread],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ("has not ended within" in ended.stderr) == (code != 5)
