"""The first contact with the store, at the start of the picker: can it be used, and what is the common secret of block hashes?

It runs in a child of the parent, because the parent must not import an event loop before it forks its other children.
"""

import asyncio
import os

from workers.host.options import ReplicaStore
from workers.replicas.address import Answer, parse_address
from workers.replicas.store import StoreError, opened

CONTACT_S = 6.0


def contact(store: ReplicaStore, offered: bytes) -> Answer:
    """Uses the store once in each way that the picker needs. `offered`: the secret to store if it has none; empty: none is needed."""
    try:
        return asyncio.run(_contact(store, offered))
    except StoreError as refused:
        return Answer(refused.why, str(refused), refused.permanent)


async def _contact(store: ReplicaStore, offered: bytes) -> Answer:
    probe = f"start-{os.urandom(8).hex()}"
    try:
        async with asyncio.timeout(CONTACT_S):
            link = await opened(store, probe)
            try:
                await link.epoch(0)
                heard = asyncio.Event()
                link.listen(lambda channel, data: heard.set())
                await link.command("PUBLISH", link.names.to(probe), b"")
                await heard.wait()
                return Answer(secret=await link.agree(offered) if offered else b"")
            finally:
                link.close()
    except TimeoutError:
        raise StoreError("slow", f"{parse_address(store.url)}: no answer in {CONTACT_S:.0f} s") from None
