"""The agent: the process of a replica that starts its trainer in each generation.

It never imports torch, so that it starts in a fraction of a second and uses little memory. It makes no
decisions: the controller decides on the number of replicas, the metrics service when a generation becomes
active.

Modules: `agent` is the state loop. `standby` prepares the next trainer, `trainer_process` is a trainer as a
process, `kill_deadline` decides when a trainer is killed, `rendezvous_socket` keeps the port of rank 0,
`heartbeat` exchanges state with the metrics service, `termination_log` writes the termination message,
`events` waits for any of these.
"""
