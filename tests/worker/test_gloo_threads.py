"""Waiting until threads of process groups have nothing left to do."""

import ctypes
import threading

import torch

from adascale_worker.membership.gloo import wait_until_idle

PR_SET_NAME = 15


def start(name: str, work: threading.Event, has_ended: threading.Event) -> threading.Thread:
    """Start a thread with a name of the kernel. After `work` is set it computes without the GIL, and sets
    `has_ended`; then it waits for ever."""

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        is_named.set()
        work.wait()
        matrix = torch.ones(1500, 1500)
        for _ in range(8):
            matrix = matrix @ matrix / 1500
        has_ended.set()
        threading.Event().wait()

    is_named = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_named.wait(30)
    return thread


def test_it_waits_for_a_thread_that_computes_and_not_for_one_that_is_blocked() -> None:
    work, has_ended = threading.Event(), threading.Event()
    start("test_computes", work, has_ended)
    wait_until_idle("test_computes")
    assert not has_ended.is_set()
    work.set()
    wait_until_idle("test_computes")
    assert has_ended.is_set()


def test_it_returns_without_such_threads() -> None:
    wait_until_idle("test_no_thread")
