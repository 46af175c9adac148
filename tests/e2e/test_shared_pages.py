"""Of three pickers with a store, one reads a model server's expensive page, and all know what it shows."""

import json
import threading
import time

from loadtest.demo.stack import LOOPBACK, get
from tests.e2e.cluster import Cluster, Picker, eventually, write_endpoints
from tests.e2e.echo import Server, servers
from tests.e2e.replica_site import PREFIX, Remote, know_each_other, store_in
from tests.redis_server import needs_redis

pytestmark = needs_redis

PAGE_S = 0.005
WINDOW_S = 8.0
REPLICAS = 3


class Expensive(Server):
    """A model server with a page that takes its only process as long as that of a real one."""

    waiting = 2
    pages = 0
    _alone = threading.Lock()

    @property  # type: ignore[override]
    def page(self) -> bytes:
        with self._alone:
            time.sleep(PAGE_S)
            self.pages += 1
        return b"vllm:num_requests_running 0\nvllm:num_requests_waiting %d\nvllm:kv_cache_usage_perc 0.1\n" % self.waiting


def waiting_at(picker: Picker) -> list[int]:
    state = json.loads(get(picker.metrics, "/debug/state") or b"{}")
    return [each["scraped"].get("waiting_requests") for each in state.get("endpoints", {}).values()]


def pages_in(server: Expensive) -> int:
    before = server.pages
    time.sleep(WINDOW_S)
    return server.pages - before


def test_one_of_three_replicas_reads_the_pages_of_a_server_and_each_does_without_their_store(cluster: Cluster) -> None:
    with servers(1, Expensive) as (server,), store_in(cluster) as store:
        file = write_endpoints(cluster.directory / "servers.yaml", [(LOOPBACK, server.server_port)])

        def replica(number: int) -> Picker:
            flags = (f"--replica-store={store.url}", f"--replica-store-prefix={PREFIX}", f"--replica-name=r{number}")
            return cluster.picker(file, *flags, workers=1, run_dir=cluster.directory / "run")

        pickers = [replica(number) for number in range(REPLICAS)]
        remotes = [Remote(cluster.directory / "run", picker) for picker in pickers]
        assert eventually(lambda: know_each_other(remotes, REPLICAS))
        together = pages_in(server)
        server.waiting = 5
        assert eventually(lambda: all(waiting_at(picker) == [5] for picker in pickers))
        used = sum(picker.counter("replica_pages_total") for picker in pickers)
        store.kill()
        assert eventually(lambda: know_each_other(remotes, 1))
        each = pages_in(server)
    print(f"pages in {WINDOW_S:g} s: {together} with a store, {each} without")
    assert together <= each / 2, "a third is expected"
    assert used >= together, "two others use each page"
