"""The controller: chooses the replica counts of jobs and carries them out.

It reads gains from the metrics service, decides with `adascale_core.decision`, and starts and stops replicas
on Kubernetes (`operator`) or on one machine (`local`). It has the command line (`cli`) and the definition of
job files (`schema`). It never imports the worker or the api: it starts them as processes and speaks HTTP with
them.
"""
