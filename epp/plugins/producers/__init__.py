"""Data producers compute data about one request that scorers and filters share."""
