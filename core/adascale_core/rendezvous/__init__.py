"""When the replicas of a job become a generation, and what an agent tells its trainer then."""
