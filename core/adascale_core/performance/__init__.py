"""How long a step takes, and what goodput a job has on a number of replicas."""
