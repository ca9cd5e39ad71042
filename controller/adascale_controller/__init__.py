"""The controller: reads jobs and gains, decides replica counts, carries the decision out.

The decision itself is `adascale_core.decision`; this package acts on it, on Kubernetes or on one machine,
and holds the command line. It never imports the worker or the api: it starts them as processes and
speaks HTTP with them.
"""
