"""The replicas that train together: how a trainer enters a generation, and what the replicas exchange.

`links` connects the trainer with its agent, and the members of a generation. `process_group` forms torch's
process group, in which they communicate. `generations` goes from one generation to the next.
"""
