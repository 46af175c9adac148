"""Data-parallel ranks behind one port: the gateway sends to that port, a header tells the server which rank was picked."""

from epp.candidates import Endpoint

RANK_HEADER = "x-data-parallel-host-port"


def at_port(endpoint: Endpoint, port: int) -> Endpoint:
    """The same endpoint, reached at another port; slot and owner stay, so load and cache are counted at the rank."""
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
