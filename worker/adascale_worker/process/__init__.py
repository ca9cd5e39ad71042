"""The process of a trainer: its environment, settings, device and signals, and how it ends.

Nothing here knows replicas, gradients or checkpoints. The agent uses `environment` and `package_version` too.
"""
