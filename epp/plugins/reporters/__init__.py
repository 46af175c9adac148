"""Reporters: what a finished response tells the gateway."""
