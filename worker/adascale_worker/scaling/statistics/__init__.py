"""Statistics of gradients, read from running training steps at the least cost, and the gain that they give.

This package only reads: parameters, gradients and the hooks of others stay as they are. The formulas are in
`adascale_core.batch.gain`; `adascale_worker.adascale` scales learning rates with the result.

From the outside to the inside: `gradient_statistics` measures steps (`steps` says which) and averages them,
`reader` reads the gradients of a step (`sharded` with FSDP2), `all_reduce` adds the numbers up over ranks,
`estimates` has the formulas.
"""
