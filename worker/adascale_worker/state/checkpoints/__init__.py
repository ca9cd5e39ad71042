"""Checkpoints in a storage, which are complete or do not exist.

`checkpointing` decides when a checkpoint is saved. `writer` writes it in a thread of its own, from a copy in
memory. `store` and `reader` write and read its files in a storage. `snapshot_memory` has the copies that the
agent keeps, and `weights` the files with the weights alone.
"""
