"""The state of training: what it consists of, and how it gets from one trainer to another.

- `tree`, `file` and `shards` are its forms: a document with tensors, a file, and the parts of processes.
- `store` writes checkpoints to a storage, where they are complete or do not exist, and `reader` reads them
  again. `weights` writes the weights alone, and `snapshot_memory` has the copies that the agent keeps.
- `program` says what is saved and restored of the program, and `schedule` when.
- `exchange` copies it between the replicas of a generation, from memory to memory.
- `state` is the door: all else of the trainer uses `State`, and `Checkpointing` of `schedule`.
"""
