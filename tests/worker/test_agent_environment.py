"""What an agent sets for its trainers: the network interface, and the number of threads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from adascale_worker.agent.trainer_environment import (
    cpu_limit,
    interface_of,
    interface_variables,
    thread_variables,
)

# -- the network interface ---------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_loopback_addresses_are_those_of_the_loopback_interface(address: str) -> None:
    assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid", "", "2001:db8::1"])
def test_an_address_that_no_interface_has_leaves_the_choice_to_gloo(address: str) -> None:
    assert interface_variables(address, {}) == {}


def test_gloo_and_nccl_use_the_interface_unless_the_user_has_chosen() -> None:
    assert interface_variables("127.0.0.1", {}) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    assert interface_variables("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}) == {"NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
def test_of_several_interfaces_the_one_with_the_address_is_found() -> None:
    script = """
set -e
ip link add first type veth peer name second
ip addr add 10.9.0.1/24 dev first; ip addr add 10.9.1.1/24 dev second; ip addr add 10.9.1.2/24 dev second
ip -6 addr add fd00::5/64 dev second nodad
ip link set first up; ip link set second up
exec "$PYTHON" -c '
from adascale_worker.agent.trainer_environment import interface_of
print(*map(interface_of, ["10.9.0.1", "10.9.1.2", "fd00::5"]))
'
"""
    done = subprocess.run(
        ["unshare", "--net", "bash", "-c", script],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "device type" in done.stderr:
        pytest.skip("the kernel has no pairs of virtual interfaces")
    assert done.stdout.split() == ["first", "second", "second"], done.stderr


# -- the number of threads ---------------------------------------------------------------------------------


def groups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """Return a tree of control groups with these files (`a__b` is `a/b`), and the file that names our own."""
    for name, content in files.items():
        file = folder / "cgroup" / name.replace("__", "/").replace("_max", ".max").replace("_cfs", ".cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (folder / "own").write_text(own)
    return folder / "cgroup", folder / "own"


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {"cpu_max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu_max": "max 100000\n"}, inf),
        ("0::/\n", {}, inf),
        ("0::/pod/worker\n", {"pod__worker__cpu_max": "max 100000", "pod__cpu_max": "150000 100000"}, 1.5),
        ("0::/pod/worker\n", {"pod__worker__cpu_max": "50000 100000", "pod__cpu_max": "150000 100000"}, 0.5),
        # the path is that on the machine, and only the container's own group is mounted
        ("0::/../../kubepods/x\n", {"cpu_max": "300000 100000"}, 3.0),
        (
            "4:cpu,cpuacct:/x\n1:name=systemd:/\n",
            {"cpu,cpuacct__x__cpu_cfs_quota_us": "400000", "cpu,cpuacct__x__cpu_cfs_period_us": "100000"},
            4.0,
        ),
        ("4:cpu:/\n", {"cpu__cpu_cfs_quota_us": "-1", "cpu__cpu_cfs_period_us": "100000"}, inf),
        ("nonsense\n", {"cpu_max": "a b"}, inf),
    ],
)
def test_the_limit_is_the_smallest_of_the_groups(
    own: str, files: dict[str, str], limit: float, tmp_path: Path
) -> None:
    assert cpu_limit(*groups(tmp_path, own, **files)) == limit


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path, tmp_path / "missing") == inf


@pytest.mark.parametrize(
    ("quota", "environ", "expected"),
    [
        ("250000", {}, {"OMP_NUM_THREADS": "2"}),
        ("50000", {}, {"OMP_NUM_THREADS": "1"}),
        ("800000", {}, {}),
        ("max", {}, {}),
        ("250000", {"OMP_NUM_THREADS": "7"}, {}),
        ("250000", {"MKL_NUM_THREADS": "7"}, {}),
    ],
)
def test_torch_gets_no_more_threads_than_may_run(
    quota: str, environ: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    root, own = groups(tmp_path, "0::/\n", cpu_max=f"{quota} 100000")
    assert thread_variables(environ, root=root, own=own, processors=8) == expected


def test_the_interface_of_this_machine_is_found_by_its_own_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no network but the loopback interface")
        own = probe.getsockname()[0]
    assert interface_of(own) in [name for _, name in socket.if_nameindex()]
