"""A simulator of a cluster, for `adascale simulate`: replays jobs whose step times and gradients are known.

`engine`, `application`, `adascale_policy` and `results` are pure: files are read by the caller, randomness is
passed in, and time is simulated. A policy sees what the controller of a real cluster would see; the truth
stays in the engine. `adascale_policy` builds the input of the decision with the code that the operator uses.
Published workloads and the policies to compare with are in `bench/`. The package may not import `local` or
`operator`, and only `adascale simulate` imports it.
"""
