"""Deciders: whether a stage of a disaggregated request is worth its hop."""
