"""Replays workloads for `adascale simulate`: reads files, runs the simulator of the core, and shows results.

The policy `adascale` builds its input with the code that the operator uses. It may not import `local` or
`operator`.
"""
