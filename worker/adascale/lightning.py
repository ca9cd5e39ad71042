"""Elastic training with Lightning: `Trainer(strategy=ElasticStrategy(...))`. See docs/frameworks.md.

Needs the extra: pip install "adascale-operator[lightning]".
"""

from adascale_frameworks.lightning.strategy import ElasticStrategy

__all__ = ["ElasticStrategy"]
