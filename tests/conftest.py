"""What all tests need."""

import os
import signal

import pytest
from hypothesis import settings

from support.examples import examples

# Each test computes little. Threads that wait for each other would take most of the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell without job control starts in the background ignores Ctrl-C, and what nohup starts a closed
# terminal. So would each process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Nothing is asserted about speed, so an example of a property may take any time. Hypothesis has a profile for
# CI, in which it would draw the same examples each time.
settings.register_profile(
    "without-deadline", settings.get_profile("default"), deadline=None, max_examples=examples(50)
)
settings.load_profile("without-deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Let all tests but those of `make test-gpu` run on the CPU, also on a machine with a GPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
