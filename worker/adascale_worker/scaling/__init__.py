"""The gain of a step, and what it does to the hyperparameters of an optimizer.

`statistics` measures the gain. Nothing here knows the trainer: programs use `AdaScale` without it too.
"""
