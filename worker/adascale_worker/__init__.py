"""The training side: the AdaScale optimizer, the elastic trainer, and the agent that starts it.

This package may import torch. It never imports the api or the controller: it meets them through HTTP,
in the words of `adascale_core.messages`.
"""
