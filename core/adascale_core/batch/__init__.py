"""Which batch sizes and replica counts a job may use, and what a batch size is worth."""
