"""Says how many media items of a request each endpoint has encoded before: typed data between the producer and its readers."""

from epp.candidates import Floats
from epp.data import Datum

MEDIA_PRODUCER = "mm-embeddings-cache-producer"


class MediaMatch:
    """Says how many of the request's media items each endpoint has cached. Every item has equal weight.

    `total`: number of distinct media items in the request. `held`: how many of them each endpoint has cached, float64 of the snapshot's
    shape (endpoints,); None: no endpoint has any, as for a request without media.
    """

    __slots__ = ("held", "total")

    def __init__(self, held: Floats | None, total: int) -> None:
        self.held = held
        self.total = total


NO_MEDIA = MediaMatch(None, 0)


def media_match(producer: str) -> Datum[MediaMatch]:
    """Returns the key of the match that the named producer emits. An empty name stands for MEDIA_PRODUCER."""
    return Datum(f"media_match/{producer or MEDIA_PRODUCER}", MediaMatch)
