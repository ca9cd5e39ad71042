"""Checkpoints in a storage, which are complete or do not exist.

`checkpointing` decides when one is saved, `writer` writes it in a thread of its own from the copy that `snapshot`
has made, and `store` reads and writes its files in a `storage`.
"""
