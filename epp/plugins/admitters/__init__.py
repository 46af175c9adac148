"""Admitters decide whether a request is admitted. The built-in ones refuse only sheddable requests (priority below 0)."""
