"""A job in networks with IPv6 only, and without IPv6: the service, the agents and gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.launch import PROGRAMS

PROGRAM = PROGRAMS / "two_replicas.py"
IPV6_ONLY = "ip -4 address flush dev lo"
WITHOUT_IPV6 = "ip -6 address flush dev lo; sysctl --quiet --write net.ipv6.conf.all.disable_ipv6=1"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
@pytest.mark.parametrize(
    ("network", "address"), [(IPV6_ONLY, "::1"), (WITHOUT_IPV6, "127.0.0.3")], ids=["ipv6", "ipv4"]
)
def test_a_job_trains_with_either_family_of_addresses(network: str, address: str, tmp_path: Path) -> None:
    script = f'ip link set lo up && {network} && exec "$@"'
    program = [sys.executable, str(PROGRAM), str(tmp_path), address]
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", script, "bash", *program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("[0, 0] ["), done.stdout + done.stderr
