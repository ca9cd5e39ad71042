"""Which job gets how many replicas, of which type of accelerator, and why."""
