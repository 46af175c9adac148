"""Ordering policies: what goes first within one flow."""
