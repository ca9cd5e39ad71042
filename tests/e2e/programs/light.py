"""A program that takes its place as a trainer does, but has nothing to train: it starts in no time.

light.py sleep          until it is ended
light.py stubborn       likewise, and SIGTERM doesn't end it
light.py exit CODE      fails, or finishes with 0
light.py crash          of a segmentation fault
"""

import os
import signal
import sys
import time

from adascale_worker import environment

environment.wait_for_assignment(os.environ)
print(f"replica {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, who: {os.environ.get('WHO')}", flush=True)

match sys.argv[1:]:
    case ["sleep"]:
        time.sleep(600)
    case ["stubborn"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    case ["exit", code]:
        print("[red]these are my last words", flush=True)
        sys.exit(int(code))
    case ["crash"]:
        os.kill(os.getpid(), signal.SIGSEGV)
