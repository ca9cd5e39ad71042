"""Lightning: a strategy with which `Trainer.fit` is elastic.

Works with `lightning.pytorch` and `pytorch_lightning`. The program's Trainer keeps its loops. The strategy
replaces the loaders and the parts of the loops that count batches, so that everything that Lightning does at
a multiple of a count follows progress. May import
`adascale_worker`, but no other adapter.
"""
