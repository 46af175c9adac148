"""An API server for experiments: `python -m tests.kube --directory kube`, until Ctrl-C.

Writes `kubeconfig` to the directory, and then `READY` when the server answers and knows the picker's kinds. The token `tok` has all
rights. Nothing runs in this cluster: see `control_plane`.
"""

import argparse
import asyncio
import signal
import sys
import threading
from pathlib import Path

from loadtest.demo.children import ChildFailed, Children
from tests.kube.control_plane import ControlPlane
from tests.kube.objects import install

LOOK_S = 1.0


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.kube", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--directory", type=Path, required=True, help="for data, certificates and logs; created if needed")
    line.add_argument("--port", type=int, default=0, help="port of the API server; 0: any free port")
    arguments = line.parse_args()
    directory = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    children = Children(directory)
    try:
        plane = ControlPlane(children, directory, arguments.port).start()
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
