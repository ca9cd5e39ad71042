"""The samples of each replica: their order, how they are loaded, and the size of batches."""
