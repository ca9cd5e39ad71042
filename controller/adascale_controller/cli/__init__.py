"""The command line `adascale`: one module for each command."""

from adascale_controller.cli.app import main

__all__ = ["main"]
