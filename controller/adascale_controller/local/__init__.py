"""Runs a job on one machine: the metrics service and one agent per replica, as processes.

This package starts and stops processes and prints messages. `adascale_core.decision` decides the replica
count, from what the metrics service reports.
"""
