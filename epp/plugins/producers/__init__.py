"""Data producers: what scorers and filters share about one request."""
