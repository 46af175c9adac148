"""Kubernetes, as the supervisor sees it: a client, what is followed with it, and what becomes of that."""
