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
from epp.learning.endpoint import EndpointModel
from epp.learning.model import LatencyModel
from workers.shared.documents import Identity
from workers.supervisor.endpoints.snapshot_file import RefusedSnapshot, Snapshot, trailer

FILE = "latency-model"
MAGIC = b"EPPLEARN"
VERSION = 1
HEADER = Struct("=8sI")
BYTES_MAX = 64 << 20

log = structlog.get_logger()


class SavedModel(msgspec.Struct, array_like=True, frozen=True):
    """The trailer: the model (`epp.learning.state`), and the identity of the endpoint in each slot."""

    model: bytes
    identities: list[tuple[int, Identity]]


def has_file(folder: str) -> bool:
    """Returns whether a folder has the file; False for ""."""
    return bool(folder) and Path(folder, FILE).exists()


class LatencyState:
    """Saves and loads the file. Call `load` once, before `save`."""

    def __init__(self, folder: str) -> None:
        self._file = Snapshot(Path(folder, FILE), "the latency model", HEADER, lambda: (MAGIC, VERSION))
        self._saved = -1  # the model's `changes` at the last write

    def load(self) -> tuple[LatencyModel, dict[Identity, EndpointModel]]:
        """Returns the model without endpoints, and what is known of each endpoint. If the file is unusable, logs why."""
        return self._file.loaded(self._load) or (LatencyModel(), {})

    def save(self, model: LatencyModel, identities: Mapping[int, Identity]) -> None:
        """Writes the model if it has changed: at most some hundred KB. Of several failures in a row, logs only the first."""
        if model.changes == self._saved:
            return
        with self._file.saving():
            self._file.write([], SavedModel(state.encode(model), list(identities.items())))
            self._saved = model.changes

    def _load(self) -> tuple[LatencyModel, dict[Identity, EndpointModel]]:
        kept, _ = trailer(self._file.read(BYTES_MAX), SavedModel)
        try:
            model = state.decode(kept.model)
        except state.UnusableModel as refused:
            raise RefusedSnapshot(str(refused)) from refused
        known = {identity: model.endpoints[slot] for slot, identity in kept.identities if slot in model.endpoints}
        for slot in list(model.endpoints):
            model.forget(slot)
        log.info("latency model taken over", file=str(self._file.path), endpoints=len(known))
        return model, known
