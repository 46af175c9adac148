"""Creates many ready pods: `python -m tests.kube.load --kubeconfig kube/kubeconfig --namespace many --pods 5000`.

Also creates the namespace, and a pool named `pool` with the selector `app=model-server`. `--delete` removes the pods again. The pods are
as large as in a real cluster (some 6 KB of JSON each), so decoding them costs a client as much as there.
"""

import argparse
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests.kube.client import Kube, Object, Refused, all_at_once
from tests.kube.objects import APP, namespace, pod, pool, status

PADDING_ENTRIES = 60


def address(number: int) -> str:
    """An address on loopback without a server. A picker that follows these pods must not contact hosts of a real network."""
    return f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def full(space: str, name: str) -> Object:
    """A pod with as many fields as in a real cluster."""
    thing = pod(space, name, {**APP, "pod-template-hash": "5d9c7b8f6d"})
    (container,) = thing["spec"]["containers"]
    container["env"] = [{"name": f"SETTING_{n}", "value": f"value of setting {n} of {name}"} for n in range(PADDING_ENTRIES)]
    container["resources"] = {"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}}
    return thing


def client(kubeconfig: Path) -> Kube:
    """A client for a kubeconfig that `tests.kube` has written."""
    config = json.loads(kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]
    url = urlsplit(server["server"])
    assert url.hostname and url.port
    return Kube(url.hostname, url.port, config["users"][0]["user"]["token"], Path(server["certificate-authority"]))


def create(kube: Kube, thing: Object) -> None:
    """Creates an object unless it exists."""
    try:
        kube.create(thing)
    except Refused as refused:
        if refused.status != 409:
            raise


def main() -> None:
    line = argparse.ArgumentParser(prog="tests.kube.load", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--kubeconfig", type=Path, required=True)
    line.add_argument("--namespace", default="many")
    line.add_argument("--pods", type=int, default=5000)
    line.add_argument("--delete", action="store_true", help="delete the pods instead")
    arguments = line.parse_args()
    kube, begun = client(arguments.kubeconfig), time.monotonic()
    pods = [full(arguments.namespace, f"server-{n}") for n in range(arguments.pods)]

    def create_ready(number: int) -> None:
        create(kube, pods[number])
        kube.patch(pods[number], status(address(number)), status=True)

    if arguments.delete:
        all_at_once(lambda one: kube.delete(one, 0), pods)
    else:
        create(kube, namespace(arguments.namespace))
        create(kube, pool(arguments.namespace))
        all_at_once(create_ready, range(arguments.pods))
    print(f"{arguments.pods} pods {'deleted' if arguments.delete else 'are ready'} after {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
