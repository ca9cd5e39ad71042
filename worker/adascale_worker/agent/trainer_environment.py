"""Variables by which trainers use the processors and the network interface of their agent."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from array import array
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Final

from adascale_worker.process.resource_limits import OWN, ROOT, ControlGroup, control_groups

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def thread_variables(
    environ: Mapping[str, str], *, root: Path = ROOT, own: Path = OWN, processors: int | None = None
) -> dict[str, str]:
    """Return the variable by which torch starts no more threads than the CPU limit allows to run.

    By itself torch starts one for each processor of the machine. They use up the limit's share of each period
    at once, and all of them stand still for the rest of it.
    """
    if any(name in environ for name in _THREAD_VARIABLES):
        return {}
    limit = cpu_limit(root, own)
    available = processors or len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(int(limit), 1))} if limit < available else {}


def cpu_limit(root: Path = ROOT, own: Path = OWN) -> float:
    """Return how many processors a process may use on average, infinite if that is not limited.

    The limit of a control group holds for those in it, so it is the smallest one up to the root. Version 2
    and version 1 of control groups are read.
    """
    return min([inf, *map(_quota, control_groups("cpu", root, own))])


def _quota(group: ControlGroup) -> float:
    if group.version == 2:
        words = group.words("cpu.max")
        return _ratio(words[0], words[1]) if len(words) == 2 else inf
    quota, period = group.words("cpu.cfs_quota_us"), group.words("cpu.cfs_period_us")
    return _ratio(quota[0], period[0]) if quota and period else inf


def _ratio(quota: str, period: str) -> float:
    """Return a quota as a number of processors; `max` and -1 are no limit."""
    try:
        return int(quota) / int(period) if int(quota) > 0 else inf
    except (ValueError, ZeroDivisionError):
        return inf


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFCONF: Final = 0x8912
"""The ioctl that lists the IPv4 addresses of all interfaces, see netdevice(7)."""
_REQUEST: Final = struct.Struct("iP")
_ENTRY: Final = struct.Struct("16s 4x 4s 16x")
"""The name of an interface, and an address in a `sockaddr_in`."""
_MOST_ADDRESSES: Final = 1024


def interface_variables(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which gloo and NCCL use the interface of an address.

    By themselves they choose one: gloo that of the host name, which is a loopback address on Debian, and NCCL
    the first one. Variables that are set already are left out.
    """
    name = interface_of(address)
    if name is None:
        return {}
    # NCCL takes a name without '=' for a prefix.
    variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {variable: value for variable, value in variables.items() if variable not in environ}


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address. None if none has, or if that is unknown."""
    try:
        wanted = {_parse(each[4][0]) for each in socket.getaddrinfo(address, None)}
        for name, found in _addresses():
            # The loopback interface has all of 127.0.0.0/8, and lists one address of it.
            if found in wanted or (found.is_loopback and any(each.is_loopback for each in wanted)):
                return name
    except (OSError, ValueError):
        # No such host, or a system without the list: gloo and NCCL choose by themselves.
        return None
    return None


def _parse(text: object) -> _Address:
    return ipaddress.ip_address(str(text).partition("%")[0])


def _addresses() -> Iterator[tuple[str, _Address]]:
    """Yield each address of this machine with the name of its interface."""
    memory = array("B", bytes(_MOST_ADDRESSES * _ENTRY.size))
    address, length = memory.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, _REQUEST.pack(length, address))
    used, _ = _REQUEST.unpack(answer)
    for name, packed in _ENTRY.iter_unpack(memory[:used]):
        yield name.rstrip(b"\0").decode(), ipaddress.ip_address(packed)
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, of_interface = line.split()
        yield of_interface, ipaddress.ip_address(bytes.fromhex(digits))
