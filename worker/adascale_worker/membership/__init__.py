"""The replicas that train together, and what they exchange.

`links` connects the trainer with its agent, and the members of a generation. `process_group` forms torch's
process group, in which they communicate. `loop.generations` goes from one generation to the next.
"""
