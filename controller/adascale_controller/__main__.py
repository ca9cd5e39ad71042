"""`python -m adascale_controller` is `adascale`."""

from adascale_controller.cli import main

main()
