"""A simulator of a cluster: replays jobs of which every step time and gradient statistic is known.

It is pure, like the rest of core: files are read by the caller, randomness is passed in, and time is
simulated. A policy sees what the controller of a real cluster would see; the truth stays in the engine.
"""
