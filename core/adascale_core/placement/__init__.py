"""Whether replicas fit onto the nodes of a cluster, and where new ones go."""
