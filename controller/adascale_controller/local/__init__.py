"""Runs a job on this machine: the metrics service and an agent per replica, as processes.

It acts and tells; what to do is decided by `adascale_core.decision`, on what the metrics service knows.
"""
