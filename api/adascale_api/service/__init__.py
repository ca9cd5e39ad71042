"""The parts of a running service: what it keeps in memory, and what it does beside requests."""
