"""A program that waits for its rank as a trainer does, but does not train, so that it starts fast.

light.py sleep          sleeps
light.py stubborn       sleeps and ignores SIGTERM
light.py exit CODE      exits
light.py crash          crashes with a segmentation fault
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
        print("[red]the last line", flush=True)
        sys.exit(int(code))
    case ["crash"]:
        os.kill(os.getpid(), signal.SIGSEGV)
