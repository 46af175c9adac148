"""Parsers read the bodies of requests, one parser per API, and fill in the `Request`."""
