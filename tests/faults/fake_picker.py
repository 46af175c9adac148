"""Runs a picker whose children serve nothing: the parent, the segments and the forks are real.

    python -m tests.faults.fake_picker RUN_DIR INSTANCE WORKERS MODE [PORT]

MODE changes the workers: `normal`, `deciding` (always about the same request), `cannot-start`, `dies-booting`, `ignores-term`,
`slow-drain`; or the parent: `slow-start`, `refused-fork` (after the first three children two forks fail). SIGUSR1 makes a worker hang.
SIGUSR2 makes it recycle: it reports that it leaves, and ends a little later. With a file `cannot-start` in RUN_DIR no worker starts.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import errno
import itertools
import select
import signal
import sys
import time

from epp.config.load import load
from shm.segment import SegmentError
from workers.host import log
from workers.host.exit_codes import ExitCode
from workers.host.options import Options
from workers.process import StartError, parent
from workers.process.instance import Instance
from workers.process.signals import signals_held
from workers.shared.query_of_death import DECIDING

TURN_S = 0.02
SUSPECT = 0x5EED


def supervisor(instance: Instance) -> int:
    """Heartbeats until parent and workers are gone, like the real supervisor."""
    area = instance.memory.areas.area(0)
    area.take_over()
    instance.reports.ready(0)
    poll = select.poll()
    poll.register(instance.pipes.workers_pipe.reader, select.POLLIN)
    while not poll.poll(TURN_S * 1000):
        area.heartbeat(time.monotonic())
    if not instance.words.stopping:  # getppid may change later than the parent's pipes close
        instance.unlink()
    return ExitCode.OK


def worker(mode: str):
    def run(instance: Instance, index: int) -> int:
        area = instance.memory.areas.area(index + 1)
        area.take_over()
        if mode == "cannot-start" or os.path.exists(os.path.join(instance.options.run_dir, "cannot-start")):
            instance.reports.failed(index + 1, "the sky is not blue")
            return ExitCode.BOOT_FAILED
        if mode == "dies-booting":
            os.kill(os.getpid(), signal.SIGSEGV)
        terminated: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number) if mode != "ignores-term" else None)
        hang: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: hang.append(number))
        recycle: list[int] = []
        signal.signal(signal.SIGUSR2, lambda number, _: recycle.append(number))
        area.counters[0] += 1
        if mode == "deciding":
            area.scalars[area.schema.scalar[DECIDING]] = SUSPECT
        instance.reports.ready(index + 1)
        poll = select.poll()
        poll.register(instance.pipes.parent_pipe.reader, select.POLLIN)
        while not terminated and not poll.poll(TURN_S * 1000):
            while hang:
                time.sleep(60)
            area.heartbeat(time.monotonic())
            if recycle:
                instance.reports.leaving(index + 1)
                time.sleep(0.3)
                return ExitCode.RECYCLED
        if mode == "slow-drain":
            time.sleep(0.3)
        return ExitCode.OK

    return run


def main() -> int:
    run_dir, name, workers, mode, *port = sys.argv[1:]
    log.configure()
    options = Options(
        run_dir=run_dir,
        instance=name,
        workers=int(workers),
        grpc_port=int(port[0]) if port else 0,
        grpc_health_port=0,
        metrics_port=0,
        secure_serving=False,
        max_endpoints=8,
        index_entries=4096,
        drain_timeout_s=1.0,
    )
    if mode == "refused-fork":
        refuse_forks(after=3, times=2)
    with signals_held():
        try:
            instance = Instance.create(options, load(None, ""))
        except (StartError, SegmentError) as refused:
            print(refused, file=sys.stderr)
            return ExitCode.FAULT
        if mode == "slow-start":
            time.sleep(0.5)
        return parent.run(instance, supervisor=supervisor, worker=worker(mode), trial=lambda instance, attempt: ExitCode.OK)


def refuse_forks(after: int, times: int) -> None:
    """Lets `times` forks fail after the first `after` ones, as a kernel does that has no memory or no room for another process."""
    fork, calls = os.fork, itertools.count(1)

    def limited() -> int:
        if after < next(calls) <= after + times:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = limited


if __name__ == "__main__":
    sys.exit(main())
