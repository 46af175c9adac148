"""Request-header plugins: what the headers of a request say about it."""
