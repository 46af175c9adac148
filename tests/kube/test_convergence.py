"""The endpoint table follows the API: it agrees with the API after any changes of pods, and no endpoint leaves without cause."""

import random
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

from tests.kube.client import Object
from tests.kube.objects import READ, pod, status
from tests.kube.table import EndpointRow, Watched
from tests.kube.world import World, until

PODS = 300
BURSTS = 4
OPERATIONS = 300  # per burst
THREADS = 6
SEED = 20

OUT = {"app": "something-else"}


class Life:
    """The pods with one name, one after the other: the present state, and the operations that are possible next."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"pod-{number}"
        self.number = number
        self.turns = 0
        self.state = "absent"
        self.uid = ""

    def step(self, rng: random.Random, log: "Log") -> None:
        """Does a random operation that is possible now."""
        possible = {
            "absent": (self.create,),
            "pending": (self.be_ready, self.be_ready, self.be_ready, self.delete),
            "ready": (self.be_unready, self.terminate, self.terminate, self.delete, self.move, self.leave_selector, self.close_ports),
            "unready": (self.be_ready, self.be_ready, self.delete),
            "outside": (self.come_back, self.delete),
            "terminating": (self.delete,),
        }
        rng.choice(possible[self.state])(log)

    @property
    def thing(self) -> Object:
        return pod(self.world.space, self.name)

    @property
    def ip(self) -> str:
        """The address. It changes with every turn, and is sometimes one that another pod had before."""
        return f"127.{20 + self.turns % 4}.{self.number // 100}.{self.number % 100 + 1}"

    def create(self, _log: "Log") -> None:
        self.turns += 1
        self.uid = self.world.kube.create(self.thing)["metadata"]["uid"]
        self.state = "pending"

    def be_ready(self, log: "Log") -> None:
        log.may_appear(self.uid)
        self.world.kube.patch(self.thing, status(self.ip), status=True)
        self.state = "ready"

    def be_unready(self, log: "Log") -> None:
        log.may_leave(self.uid)
        self.world.kube.patch(self.thing, status(self.ip, ready=False), status=True)
        self.state = "unready"

    def move(self, log: "Log") -> None:
        self.turns += 1
        log.may_leave(self.uid)
        log.may_appear(self.uid)
        self.world.kube.patch(self.thing, status(self.ip), status=True)

    def leave_selector(self, log: "Log") -> None:
        log.may_leave(self.uid)
        self.world.kube.patch(self.thing, {"metadata": {"labels": OUT}})
        self.state = "outside"

    def come_back(self, log: "Log") -> None:
        log.may_appear(self.uid)
        self.world.kube.patch(self.thing, {"metadata": {"labels": {"app": "model-server"}}})
        self.state = "ready"

    def close_ports(self, log: "Log") -> None:
        """Removes all ports and adds them again: two events that may cancel each other."""
        log.may_leave(self.uid)
        self.world.kube.patch(self.thing, {"metadata": {"annotations": {"llm-d.ai/active-ports": ""}}})
        log.may_appear(self.uid)
        self.world.kube.patch(self.thing, {"metadata": {"annotations": {"llm-d.ai/active-ports": "8000"}}})

    def terminate(self, log: "Log") -> None:
        log.may_leave(self.uid)
        self.world.kube.delete(self.thing, 30)
        self.state = "terminating"

    def delete(self, log: "Log") -> None:
        log.may_leave(self.uid)
        self.world.kube.delete(self.thing, 0)
        self.state = "absent"


class Log:
    """The causes for endpoints to appear or leave, with their times, by the UID of the pod.

    Note a cause before its request, so that it is never later than its effect.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._causes: dict[str, dict[str, list[float]]] = {"appear": defaultdict(list), "leave": defaultdict(list)}

    def may_appear(self, uid: str) -> None:
        self._note("appear", uid)

    def may_leave(self, uid: str) -> None:
        self._note("leave", uid)

    def without_cause(self, kind: str, seen: list[tuple[float, EndpointRow]]) -> list[str]:
        """The endpoints that appeared or left more often than there were causes until then."""
        counts: Counter[str] = Counter()
        wrong = []
        for at, row in seen:
            counts[row.uid] += 1
            if counts[row.uid] > sum(began <= at for began in self._causes[kind][row.uid]):
                wrong.append(f"{row.name} {row.host} {row.uid}")
        return wrong

    def _note(self, kind: str, uid: str) -> None:
        with self._lock:
            self._causes[kind][uid].append(time.monotonic())


def burst(lives: list[Life], seed: int, log: Log) -> None:
    """Does random operations in several threads. Each thread has its own pods, so that the operations on one pod are in order."""

    def work(number: int) -> None:
        rng, part = random.Random(seed * THREADS + number), lives[number::THREADS]
        for _ in range(OPERATIONS // THREADS):
            rng.choice(part).step(rng, log)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def test_the_table_agrees_with_the_api_after_random_changes_of_300_pods_and_none_leaves_without_cause(world: World) -> None:
    world.pool()
    table = world.table(world.picker())
    log, lives = Log(), [Life(world, number) for number in range(PODS)]
    with Watched(table) as watched:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda life: (life.create(log), life.be_ready(log)), lives))
        done = time.monotonic()
        took = [world.converged(table, done)]
        assert len(table.look()) == PODS
        for number in range(BURSTS):
            burst(lives, SEED + number, log)
            took.append(world.converged(table, time.monotonic()))
        before = watched.count()
        time.sleep(0.5)
        assert watched.count() == before, "the table changes although no pod does"
    print(
        f"converged after {', '.join(f'{1000 * seconds:.0f}' for seconds in took)} ms; {watched.samples} looks, "
        f"{len(watched.appeared())} appeared, {len(watched.left())} left"
    )
    assert log.without_cause("leave", watched.left()) == []
    assert log.without_cause("appear", watched.appeared()) == []


def test_a_new_pod_with_an_old_name_and_address_is_another_endpoint(world: World) -> None:
    world.pool()
    first = world.pod("one", "127.30.0.1")
    table = world.table(world.picker())
    world.converged(table)
    (before,) = table.look()
    world.kube.delete(first, 0)
    second = world.pod("one", "127.30.0.1")
    world.converged(table)
    (after,) = table.look()
    assert (before.uid, after.uid) == (first["metadata"]["uid"], second["metadata"]["uid"])
    assert (before.slot, before.generation) != (after.slot, after.generation)


def test_ports_selector_and_annotation_decide_which_endpoints_a_pod_has(world: World) -> None:
    pool = world.pool(ports=(8000, 8001))
    world.pod("both", "127.30.1.1")
    world.pod("second", "127.30.1.2", active_ports="8001, 99, nonsense")
    world.pod("none", "127.30.1.3", active_ports="")
    world.pod("foreign", "127.30.1.4", OUT)
    table = world.table(world.picker())

    def names() -> set[tuple[str, int]]:
        return {(row.name, row.port) for row in table.look()}

    until(lambda: names() == {("both-rank-0", 8000), ("both-rank-1", 8001), ("second-rank-1", 8001)}, "two ports")
    world.kube.patch(pool, {"spec": {"targetPorts": [{"number": 8001}]}})
    took = until(lambda: names() == {("both-rank-0", 8001), ("second-rank-0", 8001)}, "one port")
    print(f"other ports after {1000 * took:.0f} ms")
    world.kube.patch(pool, {"spec": {"selector": {"matchLabels": OUT}}})
    took = until(lambda: names() == {("foreign-rank-0", 8001)}, "other pods")
    print(f"another selector after {1000 * took:.0f} ms")


def test_pods_that_exist_before_their_pool_become_endpoints_when_it_is_created(world: World) -> None:
    world.pod("early", "127.30.2.1")
    world.pod("foreign", "127.30.2.2", OUT)
    picker = world.picker(ready=False)
    table = world.table(picker)
    world.refuses(picker, "InferencePool 'pool'")
    assert not table.look()
    world.pool()
    world.converged(table)
    world.cluster.wait(picker.child, picker.ready)
    assert {row.name for row in table.look()} == {"early-rank-0"}


def test_deleting_a_pool_removes_its_endpoints(world: World) -> None:
    pool = world.pool()
    world.pod("one", "127.30.3.1")
    picker = world.picker()
    table = world.table(picker)
    world.converged(table)
    world.kube.delete(pool)
    until(lambda: not table.look(), "the endpoints are gone")
    until(lambda: not picker.ready(), "the picker is not ready")
    world.pool()
    world.cluster.wait(picker.child, picker.ready)
    world.converged(table)
    assert table.look()


def test_a_selector_on_the_command_line_needs_no_pool_and_no_definitions(world: World) -> None:
    rules = [("", "pods", READ)]
    world.pod("one", "127.30.4.1")
    world.pod("foreign", "127.30.4.2", OUT)
    picker = world.picker(
        "--endpoint-target-ports=8000,8001",
        follow="--endpoint-selector=app in (model-server), !canary",
        token=world.token(rules),
        environ={"POD_NAME": "picker-5d9c7b8f6d-abcde"},
    )
    table = world.table(picker)
    world.converged(table, ports=(8000, 8001))
    assert len(table.look()) == 2
    world.pod("two", "127.30.4.3", {"app": "model-server", "canary": "yes"})
    world.pod("three", "127.30.4.4")
    until(lambda: {row.host for row in table.look()} == {"127.30.4.1", "127.30.4.4"}, "the pod without the label")
