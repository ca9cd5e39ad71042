"""`python -m adascale_worker.agent`."""

from adascale_worker.agent.cli import main

main()
