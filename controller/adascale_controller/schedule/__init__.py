"""What is remembered of each job between decisions: for the operator, `adascale run` and simulations.

Pure: no calls, no clock, no pods and no processes. Where jobs can run and what they have reported are
arguments.
"""
