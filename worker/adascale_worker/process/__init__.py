"""The process of a trainer: its environment, settings, device and signals, and how it ends.

Nothing here knows replicas, gradients or what a state consists of. The agent uses `environment`,
`resource_limits` and `snapshot_place` too.
"""
