"""The Kubernetes operator: keeps each AdaScaleJob at the replica count that the scheduler gives it.

One cycle runs four phases, each in a package of its own:

- `observe`: reads the cached objects into one `ObservedJob` for each AdaScaleJob. Pure.
- `schedule`: chooses the replica counts of all jobs, with the free resources of the nodes.
- `reconcile`: computes the `Actions` for one job from its `ObservedJob` and its replica count. Pure.
- `apply`: carries the actions out at the API server and at the metrics service.

`runtime` starts and stops the process, fills the caches and runs the cycle. `types` holds the types that the
phases pass to each other. `docs/operator.md` describes the whole. No module here imports the local runner.
"""
