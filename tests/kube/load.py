"""Many ready pods at once: `python -m tests.kube.load --kubeconfig kube/kubeconfig --namespace many --pods 5000`.

Makes the namespace and a pool named `pool` too, whose selector is `app=model-server`; `--delete` removes the pods again. The pods are
as large as those of a real cluster (some 6 KB of JSON each), so a client pays for decoding them what it would pay there.
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
    """On loopback, where nobody answers: a picker that follows these pods must not ask hosts of somebody's network."""
    return f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def full(space: str, name: str) -> Object:
    """A pod with as many words in it as an operator's."""
    made = pod(space, name, {**APP, "pod-template-hash": "5d9c7b8f6d"})
    (container,) = made["spec"]["containers"]
    container["env"] = [
        {"name": f"SETTING_{n}", "value": f"value of setting {n} of {name}"} for n in range(PADDING_ENTRIES)
    ]
    container["resources"] = {"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}}
    return made


def client(kubeconfig: Path) -> Kube:
    """Of a kubeconfig that `tests.kube` has written."""
    found = json.loads(kubeconfig.read_text())
    server = found["clusters"][0]["cluster"]
    url = urlsplit(server["server"])
    assert url.hostname and url.port
    return Kube(url.hostname, url.port, found["users"][0]["user"]["token"], Path(server["certificate-authority"]))


def create(kube: Kube, thing: Object) -> None:
    """Unless it is there already."""
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
    line.add_argument("--delete", action="store_true", help="the pods, instead")
    given = line.parse_args()
    kube, begun = client(given.kubeconfig), time.monotonic()
    pods = [full(given.namespace, f"server-{n}") for n in range(given.pods)]

    def appear(number: int) -> None:
        create(kube, pods[number])
        kube.patch(pods[number], status(address(number)), status=True)

    if given.delete:
        all_at_once(lambda one: kube.delete(one, 0), pods)
    else:
        create(kube, namespace(given.namespace))
        create(kube, pool(given.namespace))
        all_at_once(appear, range(given.pods))
    print(f"{given.pods} pods {'deleted' if given.delete else 'are ready'} after {time.monotonic() - begun:.1f} s")


if __name__ == "__main__":
    main()
