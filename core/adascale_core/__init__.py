"""The rules of AdaScale Operator, pure.

What a batch may be, what a gain is worth, which job gets how many replicas, when a generation of
replicas becomes active, and every name that two parts must agree on. The worker, the api and the
controller import this package; it imports the standard library only, and of that nothing that reads
a clock, a file, a socket or the environment: whatever a rule needs is passed in.
"""
