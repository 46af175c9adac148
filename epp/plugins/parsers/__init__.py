"""Parsers: request bodies -> `Request`."""
