"""What is measured of training, and reported to the metrics service."""
