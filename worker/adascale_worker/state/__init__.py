"""The state of training: what it consists of, and how it gets from one trainer to another.

- `tree` and `file` are its forms: a document with tensors, and a file, of which each process may have a part.
- `store` writes checkpoints to a storage, where they are complete or do not exist, and `schedule` says when.
  `weights` writes the weights alone.
- `program` says what is saved and restored of the program.
- `transfer` copies it between the replicas, from memory to memory, and `following` while they train.
- `state` is the door, with the copies that the agent keeps: all else of the trainer uses `State`, and
  `Checkpointing` of `schedule`.
"""
