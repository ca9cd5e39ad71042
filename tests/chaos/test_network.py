"""Tests that the harness slows the network down, and that training goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import network

PROGRAM = """
from dataclasses import replace
from chaos import network
from chaos.harness import Harness
from chaos.schedule import Fault, Kind, undisturbed

network.begin()
first = Fault(Kind.SLOW_NETWORK, progress=0.2, delay=0.0, target=1, seconds=4.0)
second = Fault(Kind.SLOW_NETWORK, progress=None, delay=1.0, target=2, seconds=1.0)
found = Harness().run(replace(undisturbed(2, 100), faults=(first, second)))
print("found", found)
print("faults that last", network._rates)
"""


@pytest.mark.slow
def test_packets_wait_on_a_slow_network_and_what_must_hold_holds() -> None:
    if reason := network.missing():
        pytest.skip(reason)
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [*network.UNSHARE, sys.executable, "-c", PROGRAM],
        cwd=tests,
        env={**os.environ, "CHAOS_NETWORK": "own", "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert "found []\nfaults that last []\n" in done.stdout, output
    waits = [int(line.split()[-2]) for line in output.splitlines() if "packets had to wait" in line]
    assert len(waits) == 2, output
    # The exchange of gradients in several steps, at least.
    assert waits[-1] > 100, output
