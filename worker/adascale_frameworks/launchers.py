"""The environment variables of launchers, which a framework must not find."""

from __future__ import annotations

from collections.abc import MutableMapping

from adascale_core.names import LAUNCHER_VARIABLES


def hide_launcher(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the variables from which a framework concludes that it runs in one process of several.

    Under an agent there are none. Under `torchrun` or `srun`, call this after `ElasticTrainer` was made,
    which reads the rank from them.
    """
    return {name: environ.pop(name) for name in LAUNCHER_VARIABLES if name in environ}
