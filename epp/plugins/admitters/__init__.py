"""Admitters decide whether a request is admitted, held or refused."""
