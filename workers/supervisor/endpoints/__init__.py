"""Discovers endpoints and scrapes their metrics. Publishes table rows, names, and limits of the prefix index in shared memory."""
