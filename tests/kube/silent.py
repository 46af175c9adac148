"""A picker with silent connections to the API server: no data arrives, and the connections are not closed."""

import time

from tests.kube.objects import READ, pod
from tests.kube.relay import Relay
from tests.kube.world import World, until

BEFORE = {"before-0-rank-0", "before-1-rank-0"}
AFTER = {"before-1-rank-0", "after-rank-0"}


class Silent:
    """The picker knows two pods and its watch is dead. Since then, one of the pods was deleted and another one was created."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.relay = Relay("127.0.0.1", world.plane.port)
        for number in range(2):
            world.pod(f"before-{number}", f"127.50.0.{number + 1}")
        self.picker = world.picker(
            "--endpoint-target-ports=8000",
            follow="--endpoint-selector=app=model-server",
            port=self.relay.port,
            token=world.token([("", "pods", READ)]),
            environ={"POD_NAME": "picker-5d9c7b8f6d-abcde"},
        )
        self.table = world.table(self.picker)
        world.converged(self.table)
        until(self._watches, "the picker's watch")
        self.connections = self.relay.silence()
        self.since = time.monotonic()
        world.kube.delete(pod(world.space, "before-0"), 0)
        world.pod("after", "127.50.0.3")

    def _watches(self) -> bool:
        """Returns whether the API server has a watch of the pods. It follows the list; opened later, it would not be silent."""
        pods = f"/namespaces/{self.world.space}/pods"
        return any(one.verb == "watch" and pods in one.uri for one in self.world.plane.requests())
