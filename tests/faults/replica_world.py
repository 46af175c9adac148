"""Three replicas under faults: their traffic, their victim, and what others say in the store."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

import aiohttp

from tests.e2e.cluster import COMPLETIONS, LOOPBACK, Cluster, Picker, completion, eventually
from tests.e2e.replica_site import PREFIX, Remote, ReplicaSite, know_each_other, store_in
from tests.faults.client import REQUESTS, Connection
from tests.faults.drop_proxy import DropProxy

REPLICAS = 3
VICTIM = 2  # it is not behind the Envoy: a gateway takes a replica that does not answer out by itself
HELD = 6
PACE_S = 0.02
RECOVERY_S = 60.0  # how long a check waits; a stalled machine must not fail it
USERS = 2
PASSWORD = "right"
CHANNEL = f"{PREFIX}:1:all"


class Traffic:
    """Sends requests through an Envoy all the time. `endings`: what became of them; every request must end with status 200."""

    def __init__(self, port: int) -> None:
        self.endings: Counter[str] = Counter()
        self._url = f"http://{LOOPBACK}:{port}{COMPLETIONS}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def failed(self) -> dict[str, int]:
        return {ending: count for ending, count in self.endings.items() if ending != "200"}

    async def _all(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            await asyncio.gather(*(self._user(session, user) for user in range(USERS)))

    async def _user(self, session: aiohttp.ClientSession, user: int) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                body = completion(f"user {user} asks {number % 40} " * 40, max_tokens=2)
                async with session.post(self._url, data=body) as response:
                    await response.read()
                    self.endings[str(response.status)] += 1
            except (aiohttp.ClientError, TimeoutError) as failure:
                self.endings[type(failure).__name__] += 1
            await asyncio.sleep(PACE_S)


class Held:
    """Gives a picker requests that stay in flight until this ends."""

    def __init__(self, picker: Picker) -> None:
        self._port = picker.grpc
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join()

    async def _all(self) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, LOOPBACK, self._port)
        for number in range(HELD):
            connection.open().send(REQUESTS[number])
        while not self._over.is_set():
            await asyncio.sleep(PACE_S)
        await connection.close()


class World:
    """A store, a proxy before it for replica 0, three replicas, and an Envoy over the first two. The victim has requests in flight."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.cluster = self._stack.enter_context(Cluster())
            self.store = self._stack.enter_context(store_in(self.cluster, f"requirepass {PASSWORD}"))
            self.proxy = self._stack.enter_context(DropProxy(self.store.port))
            fleet = self.cluster.fleet(4, "--decode-ms", "1")
            url = f"redis://:{PASSWORD}@{LOOPBACK}"
            urls = {0: f"{url}:{self.proxy.port}"}
            self.site = ReplicaSite(self.cluster, fleet, f"{url}:{self.store.port}", count=REPLICAS, behind=VICTIM, urls=urls)
            self.remotes = self.site.remotes()
            self.recovered()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    @property
    def victim(self) -> Picker:
        return self.site.pickers[VICTIM]

    @property
    def others(self) -> list[Remote]:
        return self.remotes[:VICTIM]

    def replace_victim(self) -> None:
        """Starts the victim again after it was killed."""
        self.cluster.forget(self.victim.child)
        self.site.pickers[VICTIM] = self.site.start(VICTIM)
        self.remotes[VICTIM] = Remote(self.site.run_dir, self.victim)

    def counted(self) -> float:
        """Waits until the other replicas count what `Held` has given to the victim. Returns the seconds."""
        return self._until(lambda: all(remote.requests() >= HELD for remote in self.others), "nobody counts what the victim has in flight")

    def forgotten(self) -> float:
        """Waits until the other replicas have cleared the victim's requests. Returns the seconds."""
        return self._until(lambda: all(remote.replicas() == REPLICAS - 2 for remote in self.others), "the victim still counts")

    def ignored(self) -> float:
        """Waits until the others have forgotten replica 0, which goes on. Returns the seconds."""
        return self._until(lambda: all(remote.replicas() == REPLICAS - 2 for remote in self.remotes[1:]), "replica 0 still counts")

    def faded(self, remotes: list[Remote]) -> float:
        """Waits until these replicas count nobody else. Returns the seconds."""
        return self._until(lambda: all(remote.replicas() == 0 for remote in remotes), "counts replicas that it cannot hear")

    def recovered(self) -> float:
        """Waits until all replicas know each other. Returns the seconds."""
        return self._until(lambda: know_each_other(self.remotes, REPLICAS), "the replicas do not find each other again")

    def _until(self, condition: Callable[[], bool], otherwise: str) -> float:
        started = time.monotonic()
        assert eventually(condition, RECOVERY_S), otherwise
        return time.monotonic() - started
