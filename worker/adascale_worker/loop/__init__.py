"""The program's training loop: steps, epochs, evaluations, changes of the generation, and its end.

This is the only package that knows all others. `training` makes the parts of a trainer, and has its loop.
"""
