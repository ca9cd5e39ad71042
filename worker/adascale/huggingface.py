"""Elastic training with the `Trainer` of Hugging Face: `from adascale.huggingface import elastic`."""

from adascale_core.errors import requires_extra

with requires_extra("adascale.huggingface", "huggingface"):
    import accelerate as _accelerate  # noqa: F401
    import transformers as _transformers  # noqa: F401

from adascale_frameworks.huggingface.elastic import elastic

__all__ = ["elastic"]
