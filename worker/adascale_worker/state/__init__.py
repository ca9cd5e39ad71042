"""The state of training: what it consists of, and how it gets from one trainer to another.

- `program` and `training` say what is saved and restored.
- `tree`, `file` and `shards` are its forms: a document with tensors, a file, and the parts of processes.
- `exchange` copies it between the replicas of a generation, from memory to memory.
- `saving` and `checkpoints` write it to a storage, and read it again.
"""
