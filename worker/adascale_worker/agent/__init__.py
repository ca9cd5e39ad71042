"""The agent: one per replica, it starts the trainer of each generation and ends with it.

It never imports torch, so that it starts in a fraction of a second and holds little memory. It decides
nothing: the controller says how many replicas there are, the metrics service when a generation begins.
"""
