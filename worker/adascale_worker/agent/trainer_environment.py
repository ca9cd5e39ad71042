"""Variables by which trainers use the processors and the network interface of their agent.

The interface that has an address is found in the kernel's list (rtnetlink(7)).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
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

_NETLINK_ROUTE: Final = 0
_GET_ADDRESSES: Final = 22
_NEW_ADDRESS: Final = 20
_DONE: Final = 3
_ERROR: Final = 2
_REQUEST_DUMP: Final = 0x301
_HEADER: Final = struct.Struct("=IHHII")
_MESSAGE: Final = struct.Struct("=BBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_TIMEOUT: Final = 5.0
"""Seconds within which the kernel answers."""


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
        for index, found in _addresses():
            # The loopback interface has all of 127.0.0.0/8, and lists one address of it.
            if found in wanted or (found.is_loopback and any(each.is_loopback for each in wanted)):
                return socket.if_indextoname(index)
    except (OSError, ValueError):
        # No such host, or a sandbox without netlink: gloo and NCCL choose by themselves.
        return None
    return None


def _parse(text: object) -> _Address:
    return ipaddress.ip_address(str(text).partition("%")[0])


def _addresses() -> Iterator[tuple[int, _Address]]:
    """Yield each address of this machine with the index of its interface."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as netlink:
        netlink.settimeout(_TIMEOUT)
        length = _HEADER.size + _MESSAGE.size
        netlink.send(_HEADER.pack(length, _GET_ADDRESSES, _REQUEST_DUMP, 1, 0) + _MESSAGE.pack(0, 0, 0, 0, 0))
        while True:
            data = netlink.recv(1 << 16)
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return
                if kind == _NEW_ADDRESS:
                    yield from _read_address(data[_HEADER.size : length])
                data = data[_aligned(length) :]


def _read_address(message: bytes) -> Iterator[tuple[int, _Address]]:
    index = _MESSAGE.unpack_from(message)[4]
    offset = _MESSAGE.size
    found: dict[int, bytes] = {}
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = message[offset + _ATTRIBUTE.size : offset + length]
        offset += _aligned(length)
    # Of a point-to-point link, IFA_ADDRESS is that of the peer.
    packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if packed is not None and len(packed) in (4, 16):
        yield index, ipaddress.ip_address(packed)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
