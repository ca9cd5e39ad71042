"""What the program passes to the trainer: models, optimizers and schedulers, their hyperparameters and weights.

These modules check, patch and compare the program's objects. They make no steps.
"""
