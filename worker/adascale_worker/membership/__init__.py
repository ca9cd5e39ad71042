"""The replicas that train together: how a trainer enters a generation, and what the replicas exchange.

`agent_channel` connects the trainer with its agent, `links` the members of a generation with each other, and
`process_group` forms torch's process group, in which they communicate. `generations` goes from one generation to
the next.
"""
