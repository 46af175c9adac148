"""Several real pickers behind one Envoy that spreads over them at random, with a real redis-server or without one."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shm import observe
from shm.prefix_index import IndexSchema
from shm.remote_area import RemoteArea, RemoteSchema
from tests.e2e.cluster import Cluster, Fleet, Picker
from tests.redis_server import RedisServer

PREFIX = "epp:default:test"


class Remote:
    """Reads what a picker knows of other replicas, from its shared memory."""

    def __init__(self, run_dir: Path, picker: Picker) -> None:
        self._segments, parts = observe.attach(observe.find(str(run_dir), name=picker.instance).segments)
        part = parts["remote"]
        assert isinstance(part.schema, RemoteSchema)
        self._area = RemoteArea(part.schema, part.region)
        index = parts["index"]
        assert isinstance(index.schema, IndexSchema)
        self._entries = index.region.array(np.uint64, index.schema.entries_at, index.schema.entries)

    def replicas(self) -> int:
        """Returns how many other replicas count; 0 if the area is not fresh."""
        return self._area.replicas if self._area.fresh(time.monotonic()) else 0

    def requests(self) -> int:
        """Returns the requests that others have in flight, as this picker counts them."""
        return int(self._area.requests.sum()) if self._area.fresh(time.monotonic()) else 0

    def tokens(self) -> int:
        return int(self._area.tokens.sum()) if self._area.fresh(time.monotonic()) else 0

    def entries(self) -> int:
        """Returns how many entries its prefix index has."""
        return int(np.count_nonzero(self._entries))

    def least(self) -> int:
        """Returns the smallest number of requests of one endpoint; below 0 would be a fault."""
        return int(self._area.requests.min())


class ReplicaSite:
    """A fleet, `count` pickers over it, and one Envoy over the first `behind` of them; None: all.

    `url`: of their store; "" for pickers that share nothing. `urls`: those of replicas that reach it in another way.
    """

    def __init__(
        self,
        cluster: Cluster,
        fleet: Fleet,
        url: str,
        *flags: str,
        count: int = 3,
        behind: int | None = None,
        workers: int = 1,
        urls: Mapping[int, str] = {},
        config_text: str = "",
    ) -> None:
        self.cluster = cluster
        self.fleet = fleet
        self.url = url
        self._flags = flags
        self._workers = workers
        self._config_text = config_text
        self.pickers = [self.start(number, url=urls.get(number, "")) for number in range(count)]
        self.port = cluster.envoy(self.pickers[0], replicas=self.pickers[1:behind])

    def start(self, number: int, *more: str, url: str = "") -> Picker:
        """Starts replica `number`. `url`: of its store, if it differs from that of the others."""
        flags = [*self._flags, *more]
        if self.url:
            store = [f"--replica-store={url or self.url}", f"--replica-name=replica-{number}"]
            flags = [*store, f"--replica-store-prefix={PREFIX}", *flags]
        return self.cluster.picker(self.fleet.file, *flags, workers=self._workers, run_dir=self.run_dir, config_text=self._config_text)

    @property
    def run_dir(self) -> Path:
        return self.cluster.directory / "run"

    def remotes(self) -> list[Remote]:
        return [Remote(self.run_dir, picker) for picker in self.pickers]


def know_each_other(remotes: Sequence[Remote], count: int) -> bool:
    """Returns whether each of these pickers counts `count` - 1 others."""
    return all(remote.replicas() == count - 1 for remote in remotes)


def store_in(cluster: Cluster, *settings: str) -> RedisServer:
    """Makes a store in the directory of the cluster. The caller starts and ends it."""
    directory = cluster.directory / "store"
    directory.mkdir()
    return RedisServer(directory, *settings)
