"""An API server to try things against: `python -m tests.kube --directory kube`, until Ctrl-C.

Writes `kubeconfig` into the directory, then `READY` when the server answers and knows the picker's kinds. The token `tok` may do
everything. Nothing runs in this cluster: see `control_plane`.
"""

import argparse
import asyncio
import signal
import sys
import threading
from pathlib import Path

from tests.kube.control_plane import ControlPlane
from tests.kube.objects import install
from workers.demo.children import ChildFailed, Children

LOOK_S = 1.0


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.kube", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--directory", type=Path, required=True, help="for data, certificates, logs; made if need be")
    line.add_argument("--port", type=int, default=0, help="of the API server; 0: any free one")
    given = line.parse_args()
    directory = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    children = Children(directory)
    try:
        plane = ControlPlane(children, directory, given.port).start()
        install(plane.kube())
        config = plane.kubeconfig(directory / "kubeconfig")
        (directory / "READY").touch()
        plane.close()
        print(f"ready: KUBECONFIG={config}", flush=True)
        while not ending.wait(LOOK_S):
            children.check()
    except ChildFailed as failed:
        sys.exit(str(failed))
    finally:
        (directory / "READY").unlink(missing_ok=True)
        asyncio.run(children.end())
    return 0


if __name__ == "__main__":
    sys.exit(main())
