"""Data sources and extractors: metrics pages -> columns."""
