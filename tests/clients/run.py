"""Conformance test of the ext_proc port with another gRPC library: Node's @grpc/grpc-js in place of Envoy, with a real picker.

    python -m tests.clients.run [--json]

A picker with two workers and simulated servers runs without TLS and with it. All cases of `node/client.js` run against each. Afterwards
no load may count as in flight. `node/package-lock.json` pins the packages with their checksums. Exit status 0: every case passed.
"""

import argparse
import json
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.e2e.cluster import Cluster, Picker, eventually
from tests.tools import NODE, provide

HERE = Path(__file__).parent / "node"
CLIENT_S = 180.0


class Outcome(NamedTuple):
    """The results of the client at one picker."""

    target: str
    passed: list[str]
    failed: list[str]
    seconds: float


def install() -> None:
    """Installs the packages. Exits with instructions if that fails."""
    provide(NODE)
    lock, stamp = HERE / "package-lock.json", HERE / "node_modules" / ".package-lock.json"
    if stamp.exists() and stamp.stat().st_mtime >= lock.stat().st_mtime:
        return
    if subprocess.run(["npm", "ci", "--silent"], cwd=HERE, check=False).returncode:
        sys.exit(f"npm ci failed in {HERE}: see above (it downloads the packages in package-lock.json)")


def client(picker: Picker, *, secure: bool) -> Outcome:
    """Runs all cases against one picker."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        argv = ["node", "client.js", f"127.0.0.1:{picker.grpc}"]
        if secure:  # the client must trust the picker's self-signed certificate
            certificate = Path(folder) / "server.pem"
            certificate.write_text(ssl.get_server_certificate(("127.0.0.1", picker.grpc)))
            argv.append(str(certificate))
        run = subprocess.run(argv, cwd=HERE, capture_output=True, text=True, timeout=CLIENT_S, check=False)
    lines = run.stdout.splitlines()
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    passed = [line.removeprefix("ok ") for line in lines if line.startswith("ok ")]
    if not passed or (run.returncode and not failed):
        failed.append(f"the client broke: {run.stderr[-1000:]}")
    if not eventually(lambda: not picker.in_flight()):
        failed.append(f"load in flight after all cases: {picker.in_flight()}")
    return Outcome("TLS" if secure else "plaintext", passed, failed, time.monotonic() - begun)


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.clients.run", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = line.parse_args()
    install()
    with Cluster() as cluster:
        fleet = cluster.fleet(3)
        outcomes = [
            client(cluster.picker(fleet.file, f"--secure-serving={secure}".lower(), workers=2), secure=secure) for secure in (False, True)
        ]
    if options.json:
        print(json.dumps([outcome._asdict() for outcome in outcomes]))
    else:
        for outcome in outcomes:
            print(f"@grpc/grpc-js, {outcome.target}, {outcome.seconds:.1f} s")
            for name in outcome.passed:
                print(f"  ok      {name}")
            for name in outcome.failed:
                print(f"  FAILED  {name}")
        print(f"{sum(len(o.passed) for o in outcomes)} passed, {sum(len(o.failed) for o in outcomes)} failed")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
