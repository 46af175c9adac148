"""Parsers turn request bodies into a `Request`."""
