"""What the adapters share: launchers' variables, multiples that a step crosses, samplers of the program."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

from torch.utils.data import RandomSampler

from adascale_core.names import LAUNCHER_VARIABLES


def hide_launcher(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove, and return, the variables from which a framework concludes that it runs in several processes.

    Under `torchrun` or `srun`, call this after `ElasticTrainer` was made, which reads the rank from them.
    """
    return {name: environ.pop(name) for name in LAUNCHER_VARIABLES if name in environ}


def crossed(interval: int, before: float, after: float) -> range:
    """Return the multiples of an interval that an optimizer step has crossed, in ascending order.

    A step at a larger batch is worth several steps at the initial batch size, so it can cross a multiple
    without ending at it, and several multiples at once. Each multiple is crossed by exactly one step.
    """
    if interval < 1:
        raise ValueError(f"interval is {interval}: it must be at least 1")
    if not 0 <= before <= after < math.inf:
        raise ValueError(f"progress went from {before} to {after}: it starts at 0 and only rises")
    # Integers, because a quotient of floats may be rounded up to the next multiple.
    first, last = int(before) // interval + 1, int(after) // interval
    return range(first * interval, last * interval + 1, interval)


def shuffles_all(sampler: object, samples: int) -> bool:
    """Whether a sampler is that of `shuffle=True`: each sample of the data set once, in a random order."""
    return (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source) == samples
    )
