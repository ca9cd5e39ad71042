"""The process of a trainer: its environment, settings, device and signals, and how it ends.

Nothing here knows replicas, gradients or checkpoints. `environment` and `package_version` are also the agent's.
"""
