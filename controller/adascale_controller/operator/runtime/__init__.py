"""Starts and stops the operator, fills the caches, fetches lookups, and runs the cycle of the four phases.

The only package that knows all others, kopf, the lease and the clock. It decides nothing about a job.
"""
