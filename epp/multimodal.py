"""Which media of one request each endpoint has encoded before: typed data between the producer and its readers."""

from epp.candidates import Floats
from epp.data import Datum

MEDIA_PRODUCER = "mm-embeddings-cache-producer"


class MediaMatch:
    """`total` distinct media items of the request; `held` of them per endpoint, float64 of the snapshot's shape.

    `held` is None while no endpoint holds any, as for a request without media. Every item counts alike.
    """

    __slots__ = ("held", "total")

    def __init__(self, held: Floats | None, total: int) -> None:
        self.held = held
        self.total = total


NO_MEDIA = MediaMatch(None, 0)


def media_match(producer: str) -> Datum[MediaMatch]:
    """The key under which the producer of that name emits its match; an empty name is the usual producer."""
    return Datum(f"media_match/{producer or MEDIA_PRODUCER}", MediaMatch)
