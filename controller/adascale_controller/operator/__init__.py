"""The Kubernetes operator: moves AdaScaleJobs between replica counts.

What to do is decided by pure functions, the decision itself by the core; only `cluster`, `lease` and
`watching` talk with Kubernetes, and only `cycle` puts the pieces together. `docs/operator.md` has the shape.
Nothing here imports the local runner.
"""
