"""The gain of a step, and what it does to the hyperparameters of an optimizer.

`statistics` measures the gain. Nothing here knows replicas that come and go: `AdaScale` is used without a trainer too.
"""
