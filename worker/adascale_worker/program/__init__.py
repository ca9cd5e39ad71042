"""What the program passes to the trainer: models, optimizers, schedulers, hyperparameters and weights.

These modules check, patch and compare the objects of the program. They make no steps.
"""
