"""A wrapper that starts a program as its child, COUNT times at once, and ends with the highest exit code.

Usage: python starts.py COUNT PROGRAM ARGUMENT ...

The children inherit no descriptors, and are in sessions of their own.
"""

import subprocess
import sys

children = [subprocess.Popen(sys.argv[2:], start_new_session=True) for _ in range(int(sys.argv[1]))]
sys.exit(max(child.wait() % 256 for child in children))
