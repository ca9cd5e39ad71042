"""Adapters with which the trainers of other frameworks become elastic, each in a package of its own.

An adapter uses `ElasticTrainer` as any program does. The framework believes that it runs alone: it wraps no
model, shares out no samples and gathers nothing, because the trainer does. What it counts is set from
progress, in steps at the initial batch size. `adascale.huggingface`, `adascale.accelerate` and
`adascale.lightning` are the public modules. An adapter imports no other adapter; the worker imports none.
"""
