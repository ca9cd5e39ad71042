"""Checkpoints in a storage, which are complete or do not exist.

`checkpointing` decides when a checkpoint is saved. `writer` writes it in a thread of its own, from the copy
that `snapshot` has made. `store` reads and writes its files in a `storage`.
"""
