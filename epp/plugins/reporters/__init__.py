"""Reporters give the gateway data about a finished response."""
