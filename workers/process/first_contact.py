"""At the start, checks the replica store and reads the common secret from the store, in a child process
(`workers.replicas.store.contact`).
"""

import os
import select
import signal
import time
from typing import TYPE_CHECKING

import msgspec
import structlog

from workers.process import StartError, Unusable, fork
from workers.replicas.address import ContactAnswer

if TYPE_CHECKING:
    from workers.host.options import ReplicaStore

WAIT_S = 10.0
ANSWER_BYTES_MAX = 1 << 16
OWN_SECRET = (
    "this replica hashes with a secret of its own: if the store has another one later, it shares load but no prefixes. Restart it then, "
    "or give all replicas the same --prefix-secret-file"
)

log = structlog.get_logger()


def agreed_secret(store: "ReplicaStore", offered: bytes) -> bytes:
    """Checks the store, and returns the secret of block hashes that all replicas share. Returns "" if `offered` is empty or the store
    fails.

    `offered`: the secret to store if the store has none; empty if the picker needs no secret. If the store cannot be used, raises
    StartError, or Unusable if another start would not help. With --replica-store-required=false, logs a warning instead. Then the replica
    keeps its own secret until it ends, because its workers hash with it from the start.
    """
    answer = _asked(store, offered)
    if not answer.why:
        return answer.secret
    text = f"--replica-store cannot be used: {answer.text}"
    if not store.required:
        later = OWN_SECRET if offered else "once the store can be used, this replica shares everything"
        log.warning("the replica store cannot be used: this replica starts alone", why=answer.text, later=later)
        return b""
    wrong: type[StartError] = Unusable if answer.permanent else StartError
    raise wrong(f"{text}; repair it, or start alone with --replica-store-required=false")


def _asked(store: "ReplicaStore", offered: bytes) -> ContactAnswer:
    from workers.replicas.store import contact  # the import is before the fork, because the child's time is limited

    reader, writer = os.pipe2(os.O_CLOEXEC)

    def send(found: ContactAnswer) -> None:
        os.write(writer, msgspec.msgpack.encode(found))

    def child() -> int:
        send(contact(store, offered))
        return 0

    def failed(text: str) -> None:
        send(ContactAnswer("error", text))

    pid = fork.spawn(f"{fork.TITLE}store", child, closed=[reader], failed=failed)
    os.close(writer)
    try:
        return _read(reader)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _read(reader: int) -> ContactAnswer:
    """Reads the child's answer. Also returns an answer if the child ends or hangs without one."""
    deadline, data = time.monotonic() + WAIT_S, b""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
        part = os.read(reader, ANSWER_BYTES_MAX)
        if not part:
            break
        data += part
    return msgspec.msgpack.decode(data, type=ContactAnswer) if data else ContactAnswer("slow", "no answer")
