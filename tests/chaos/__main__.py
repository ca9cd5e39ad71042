"""The command line of the fault harness."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chaos
from chaos import network
from chaos.harness import Harness
from chaos.processes import kill_all


def main() -> None:
    """Run, and exit with 1 if something does not hold or if no run was made."""
    parser = argparse.ArgumentParser(
        prog="chaos", description=chaos.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=25)
    parser.add_argument("--faults", type=int, default=200, help="of all runs together")
    parser.add_argument("--seed", type=int, help="of the first run; the next ones have the next seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument(
        "--keep", type=Path, help="a folder for the files of all runs, not only of failed ones"
    )
    arguments = parser.parse_args()
    network.enter()
    if network.is_own():
        network.begin()
    else:
        print(f"the network cannot be slowed down here: {network.missing()}", file=sys.stderr)
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    harness = Harness(keep=arguments.keep)
    counts = [
        arguments.faults * (number + 1) // arguments.runs - arguments.faults * number // arguments.runs
        for number in range(arguments.runs)
    ]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop())
    with ThreadPoolExecutor(arguments.jobs) as pool:
        passed = list(pool.map(harness.run_seed, range(seed, seed + arguments.runs), counts))
    failed = passed.count(False)
    print(f"{len(passed)} runs, {harness.faults} faults made; {failed} runs with problems")
    sys.exit(1 if failed else 0)


def stop() -> None:
    """Kill the processes of all runs, and exit."""
    kill_all(f"{os.getpid()}-")
    os._exit(130)


if __name__ == "__main__":
    main()
