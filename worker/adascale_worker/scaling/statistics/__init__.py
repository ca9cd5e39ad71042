"""Statistics of gradients, read from running training steps at the least cost, and the gain that they give.

This package only reads: parameters, gradients and the hooks of others stay as they are. The formulas are in
`adascale_core.batch.gain`; `adascale_worker.adascale` scales learning rates with the result.

From the outside to the inside: `gain_estimator` averages the measured steps (`steps` selects them),
`gradient_statistics` measures one step, `reader` reads the gradients of that step (`backward` with hooks of
autograd, `sharded` with FSDP2), `all_reduce` adds the numbers up over ranks, `estimates` has the formulas.
"""
