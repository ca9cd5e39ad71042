"""The agent: the process of a replica, which starts its trainer and assigns it to generations.

It never imports torch, so that it starts in a fraction of a second and uses little memory. It makes no
decisions: the controller decides on the number of replicas, the metrics service when a generation becomes
active.

Modules: `agent` is the state loop, and decides when a trainer is killed and when the next one starts.
`trainer_process` is the trainer as a process, with what it reports, `trainer_environment` has
variables for it. `heartbeat` exchanges state with the metrics service, and `link_check` tries to connect to
the members that train. `replica_time` adds up where the time of the replica goes.
"""
