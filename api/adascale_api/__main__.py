"""`python -m adascale_api` is `adascale-api`."""

from adascale_api.cli import main

main()
