"""Runs the command `adascale-api` for `python -m adascale_api`."""

from adascale_api.cli import main

main()
