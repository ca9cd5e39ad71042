"""The network of the harness: a network namespace of its own, whose loopback device can be slowed down.

All processes of all runs talk over the loopback device. The kernel lets a process change that of a namespace
which it has made, also without being root, where user namespaces are permitted. Then the device passes on a
given number of bits per second, keeps packets for at most `LATENCY`, and drops others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Final

UNSHARE: Final = ("unshare", "--user", "--map-root-user", "--net", "--")
"""A command in a namespace of its own."""
RATES: Final = (64, 256, 1024)
"""Rates of a slow network, in kbit/s. The replicas exchange some KB per step of the program."""
LATENCY: Final = "400ms"
_MARK: Final = "CHAOS_NETWORK"
_DEVICE: Final = ("dev", "lo")

_lock = threading.Lock()
_rates: list[int] = []
"""Those of the faults that last."""


def enter() -> None:
    """Run this program again in a network namespace of its own, where that is permitted."""
    if is_own() or missing():
        return
    os.execvpe(
        UNSHARE[0],
        [*UNSHARE, sys.executable, "-m", "chaos", *sys.argv[1:]],
        {**os.environ, _MARK: "own"},
    )


def missing() -> str:
    """Return why the network of a program cannot be slowed down here; empty if it can."""
    try:
        _run("ip", "link", "set", "dev", "lo", "up", prefix=UNSHARE)
        _run("tc", *_limit(RATES[0]), prefix=UNSHARE)
    except FileNotFoundError as error:
        return f"there is no command {error.filename}"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


def is_own() -> bool:
    """Whether this process is in a namespace that `enter` has made; then the network can be slowed down."""
    return _MARK in os.environ


def begin() -> None:
    """Set up the loopback device of a new namespace, with the packets of an Ethernet."""
    _run("ip", "link", "set", "dev", "lo", "mtu", "1500", "up")


def slow_down(rate: int) -> None:
    """Slow the network down until `restore`. The slowest of several faults counts.

    Args:
        rate: in kbit/s.
    """
    with _lock:
        _rates.append(rate)
        _run("tc", *_limit(min(_rates)))


def restore(rate: int) -> int:
    """End a fault that `slow_down` has begun; return how often packets had to wait since the first."""
    with _lock:
        _rates.remove(rate)
        (device,) = json.loads(_run("tc", "-statistics", "-json", "qdisc", "show", *_DEVICE))
        if _rates:
            _run("tc", *_limit(min(_rates)))
        else:
            _run("tc", "qdisc", "del", *_DEVICE, "root")
        return int(device["overlimits"])


def _limit(rate: int) -> list[str]:
    limits = ["tbf", "rate", f"{rate}kbit", "burst", "16kb", "latency", LATENCY]
    return ["qdisc", "replace", *_DEVICE, "root", *limits]


def _run(*command: str, prefix: tuple[str, ...] = ()) -> str:
    done = subprocess.run([*prefix, *command], check=True, capture_output=True, text=True)
    return done.stdout
