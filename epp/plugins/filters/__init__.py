"""Filters: which candidates stay."""
