"""The agent: the process of a replica, which starts its trainer and assigns it to generations.

It never imports torch, so that it starts in a fraction of a second and uses little memory. It makes no
decisions: the controller decides on the number of replicas, the metrics service when a generation becomes
active.

Modules: `agent` is the state loop. `trainer_process` is a trainer as a process,
`trainer_status` what it has reported, `kill_deadline` decides when a trainer is killed, `restart_backoff`
when the next one starts, `heartbeat` exchanges state with the metrics service, `termination_log` writes the
termination message, `events` waits for any of these. `snapshots` keeps copies of the state, in
`snapshot_files`: `snapshot_server` sends them, `snapshot_receiver` gets those of another agent, over a
`snapshot_channel`.
"""
