"""The order of samples for a program with its own trainer, see docs/training.md."""

from adascale_worker.batches.elastic_loader import ElasticDataLoader

__all__ = ["ElasticDataLoader"]
