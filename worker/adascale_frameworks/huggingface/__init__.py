"""The adapter of Hugging Face's `Trainer`. `adascale.huggingface` is its public module.

The loop stays that of `transformers`. `elastic` gives the trainer another class, a subclass of its own, which
replaces what the loop calls: the data loader, the callbacks, the loss, the evaluation, the files. The loop
runs once for each micro-batch. What happens once per step is called when the step is complete, with a
`global_step` that is the progress of training.
"""
