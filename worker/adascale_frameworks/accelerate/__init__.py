"""Accelerate's `Accelerator`, made elastic.

`accelerator.py` has the class, with the data loaders that it prepares; `private.py` all that is used of
Accelerate and not documented by it, and sets what Accelerate knows of the replicas.
"""
