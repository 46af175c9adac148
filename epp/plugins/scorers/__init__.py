"""Scorers give each candidate a score in [0, 1]."""
