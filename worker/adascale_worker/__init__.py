"""The training side: the AdaScale optimizer, the elastic trainer, and the agent that starts it.

Programs import the public names from `adascale`. Modules of the trainer import torch. The agent, which runs
beside the trainer, does not, so that it starts fast. This package never imports the api or the controller: it
exchanges `adascale_core.messages` with them over HTTP.
"""
