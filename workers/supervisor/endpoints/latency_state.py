"""Keeps the latency model over restarts of the picker, as a file in `--state-dir`.

    latency-model   header: magic | version  | trailer, msgpack | footer

The footer is as in `snapshot_file`, which writes and reads the file. The supervisor writes it every minute and at its end. A successor
finds each endpoint again by its identity. No failure here ends the picker: it begins with a new model, or does not save it, and logs why.
"""

from collections.abc import Mapping
from pathlib import Path
from struct import Struct

import msgspec
import structlog

from epp.learning import state
from epp.learning.model import EndpointModel, LatencyModel
from workers.shared.documents import Identity
from workers.supervisor.endpoints.snapshot_file import FOOTER, RefusedSnapshot, read, trailer_at, write

FILE = "latency-model"
MAGIC = b"EPPLEARN"
VERSION = 1
HEADER = Struct("=8sI")
BYTES_MAX = 64 << 20

log = structlog.get_logger()


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """The trailer: the model (`epp.learning.state`), and the identity of the endpoint in each slot."""

    model: bytes
    identities: list[tuple[int, Identity]]


class LatencyState:
    """Saves and loads the file. Call `load` once, before `save`."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, FILE)
        self._saved = -1  # the model's `changes` at the last write
        self._failed = False

    def load(self) -> tuple[LatencyModel, dict[Identity, EndpointModel]]:
        """Returns the model without endpoints, and what is known of each endpoint. If the file is unusable, logs why."""
        try:
            return self._load()
        except FileNotFoundError:
            return LatencyModel(), {}
        except (OSError, RefusedSnapshot, state.UnusableModel) as refused:
            why = refused.strerror if isinstance(refused, OSError) else str(refused)
            log.warning("the latency model begins anew", file=str(self._path), why=why)
            return LatencyModel(), {}

    def save(self, model: LatencyModel, identities: Mapping[int, Identity]) -> None:
        """Writes the model if it has changed: at most some hundred KB. Of several failures in a row, logs only the first."""
        if model.changes == self._saved:
            return
        try:
            trailer = msgspec.msgpack.encode(Kept(state.encode(model), list(identities.items())))
            write(self._path, [HEADER.pack(MAGIC, VERSION)], trailer)
        except OSError as refused:
            if not self._failed:
                log.warning("the latency model is not saved", file=str(self._path), why=refused.strerror)
            self._failed = True
            return
        self._failed, self._saved = False, model.changes

    def _load(self) -> tuple[LatencyModel, dict[Identity, EndpointModel]]:
        content = read(self._path, HEADER.size, _check, BYTES_MAX)
        try:
            kept = msgspec.msgpack.decode(content[trailer_at(content) : -FOOTER.size], type=Kept)
        except msgspec.DecodeError as failure:
            raise RefusedSnapshot(f"it is damaged: {failure}") from failure
        model = state.decode(kept.model)
        known = {identity: model.endpoints[slot] for slot, identity in kept.identities if slot in model.endpoints}
        for slot in list(model.endpoints):
            model.forget(slot)
        log.info("latency model taken over", file=str(self._path), endpoints=len(known))
        return model, known


def _check(head: bytes) -> None:
    """Raises RefusedSnapshot unless the header is that of a latency model of this version."""
    if not head.startswith(MAGIC) or len(head) < HEADER.size:
        raise RefusedSnapshot("it is not a latency model")
    _, version = HEADER.unpack(head)
    if version != VERSION:
        raise RefusedSnapshot(f"it has version {version}, and this picker reads version {VERSION}")
