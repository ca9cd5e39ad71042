"""How a replica ends, what counts as a failure of the program, and how often it has failed."""
