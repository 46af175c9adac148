"""Publishes the models of the endpoints of several pools for workers: `endpoints.model_pages` asks the endpoints.

No endpoint is asked if no pool is chosen by model, as with pools that the picker finds while it runs.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

from shm.documents import DocumentReader, DocumentWriter
from workers.process.instance import Instance
from workers.shared.documents import ENDPOINTS, Served, encode, fitting, models_of
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.endpoints import EndpointTable
from workers.supervisor.endpoints.http_client import Dialer
from workers.supervisor.endpoints.model_pages import LOOK_S, ModelPages, get

DIALERS_MAX: Final = 8  # dialers with different TLS contexts; each dialer has a buffer


def decides(instance: Instance) -> bool:
    """Returns whether any pool is chosen by model."""
    return instance.choice is not None and bool(instance.choice.by_model)


async def follow_models(present: Callable[[], Instance], table: Callable[[], EndpointTable], report: Callable[..., None]) -> None:
    """Asks the endpoints in the table for their models, and publishes these, until it is cancelled."""
    instance, publisher = present(), ModelsPublisher(present(), report)
    documents = DocumentReader(instance.layout.documents, instance.memory.documents)
    pages = ModelPages(getting(present), publisher.publish, report)
    version, known = 0, present().choice
    while True:
        choice = present().choice
        if (now := documents.version(ENDPOINTS)) != version or choice is not known:
            version, known = now, choice
            assert choice is not None
            pages.follow(spec for spec in table().specs() if spec.pool in choice.by_model)
        await pages.look()
        await asyncio.sleep(LOOK_S)


def getting(present: Callable[[], Instance]) -> Callable[[EndpointSpec], Awaitable[bytes]]:
    """Returns a function that gets an endpoint's answer, over TLS as the metrics pages of its pool."""
    dialers: dict[ssl.SSLContext | None, Dialer] = {}

    def asked(spec: EndpointSpec) -> Awaitable[bytes]:
        pool = present().pools[spec.pool]
        tls = pool.credentials.scrape_tls[pool.sources.scraped[0].name]
        if tls not in dialers:
            if len(dialers) >= DIALERS_MAX:
                dialers.clear()
            dialers[tls] = Dialer(asyncio.get_running_loop(), tls)
        return get(dialers[tls], spec)

    return asked


class ModelsPublisher:
    """Writes the document. If not all models fit, reports the number of missing models, once for each number."""

    def __init__(self, instance: Instance, report: Callable[..., None]) -> None:
        self._writer = DocumentWriter(instance.layout.documents, instance.memory.documents)
        self._document = models_of(len(instance.pools))
        self._report = report
        self._left_out = 0

    def publish(self, served: Served) -> None:
        """Writes the models of all pools."""
        room = self._writer.schema.capacities[self._document]
        shown = fitting(served, room)
        self._writer.write(self._document, encode(shown))
        before, self._left_out = self._left_out, sum(map(len, served.values())) - sum(map(len, shown.values()))
        if self._left_out not in (0, before):
            why = f"the names of all models do not fit into {room} bytes; each request still finds its pool"
            self._report("models are not listed", count=self._left_out, reason=why)
