"""`python -m adascale_controller` runs the command `adascale`."""

from adascale_controller.cli import main

main()
