"""What AdaScale must know of gradients, read from a running training step at the least cost.

Everything here looks and never touches: parameters, gradients and the hooks of others stay as they are.
The formulas are in `adascale_core.gain`; what to do with the result is for `adascale_worker.adascale`.
"""
