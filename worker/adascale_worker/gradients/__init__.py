"""From the backward passes of the program to the gradients of a step, averaged over the replicas."""
