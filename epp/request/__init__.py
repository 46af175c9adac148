"""One request: what the client sent, how it is read, and where it may go."""

from epp.request.client_headers import DEFAULT_FLOW
from epp.request.request import BYTES_PER_TOKEN, EMPTY_PROMPT, USUAL, Extent, Feature, Media, Parts, Prompt, Request, Subset, Tenant

__all__ = [
    "BYTES_PER_TOKEN", "DEFAULT_FLOW", "EMPTY_PROMPT", "USUAL",
    "Extent", "Feature", "Media", "Parts", "Prompt", "Request", "Subset", "Tenant",
]  # fmt: skip
