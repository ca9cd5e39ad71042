"""The rules of a job, the same for pods and for the processes of a run on one machine.

When it fails for good, what counts as a failure, when a replica is restarted, which replica counts are given
up for how long, its phases, and the words for all of it. Pure: no I/O and no clock. It may import the
definition of jobs and the core, and neither `local` nor `operator`.
"""
