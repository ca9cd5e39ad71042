"""Accelerate's `Accelerator`, made elastic.

`accelerator.py` has the class; `loaders.py` the data loaders that it prepares; `refusals.py` what it refuses;
`replicas.py` sets what Accelerate knows of the replicas; `private.py` has all that is used of Accelerate and
not documented by it.
"""
