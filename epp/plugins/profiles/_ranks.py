"""Data-parallel ranks behind one port: the gateway sends to that port, and a header tells the server the picked rank."""

from epp.candidates import Endpoint


def at_port(endpoint: Endpoint, port: int) -> Endpoint:
    """Returns the endpoint with another port. Slot and owner stay the same, so load and cache still count for the picked rank."""
    return Endpoint(
        name=endpoint.name,
        namespace=endpoint.namespace,
        host=endpoint.host,
        port=port,
        labels=endpoint.labels,
        slot=endpoint.slot,
        generation=endpoint.generation,
        owner=endpoint.owner,
    )
