"""Phase 2: chooses the replica counts of all jobs that may run.

Computes the free resources of the nodes, which nodes each job's pods may use, and which counts recently could
not be placed, and calls `adascale_core.decision` with them. It makes no calls to the API server
or the metrics service. It may import `observe` and `types`.
"""
