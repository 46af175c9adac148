"""Ordering policies decide which request of a flow goes first."""
