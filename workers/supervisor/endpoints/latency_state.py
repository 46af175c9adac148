"""Keeps latency models over restarts of the picker, as files in `--state-dir`.

    latency-model              header: magic | version  | trailer, msgpack | footer
    pools/NAME/latency-model   the same for one of several pools

The footer is as in `snapshot_file`, which writes and reads the file. The supervisor writes it every minute and at its end. A successor
finds each endpoint again by its identity. No failure here ends the picker: it begins with a new model, or does not save the model, and logs
why.

The folder of a pool outlasts the pool, so a pool that comes back continues with its model. At its start, the picker keeps the folders of
its pools and the GONE_MAX most recently written other folders, and removes the rest. Files that the picker did not write stay.
"""

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from struct import Struct

import msgspec
import structlog

from epp.learning import state
from epp.learning.endpoint import EndpointModel
from epp.learning.model import LatencyModel
from workers.process.instance import Instance
from workers.shared.documents import Identity
from workers.supervisor.endpoints.snapshot_file import RefusedSnapshot, Snapshot, trailer

FILE = "latency-model"
MAGIC = b"EPPLEARN"
VERSION = 1
HEADER = Struct("=8sI")
BYTES_MAX = 64 << 20
POOLS = "pools"
GONE_MAX = 100

log = structlog.get_logger()


class SavedModel(msgspec.Struct, array_like=True, frozen=True):
    """The trailer: the model (`epp.learning.state`), and the identity of the endpoint in each slot."""

    model: bytes
    identities: list[tuple[int, Identity]]


def state_folder(instance: Instance) -> str:
    """Returns the folder for the state of one pool, or "" without --state-dir or for a place without a pool."""
    folder, name = instance.options.state_dir, instance.options.pool_name
    if not folder or instance.pool is None:
        return folder
    # Names of pools have neither slashes nor a dot at the beginning.
    return os.path.join(folder, POOLS, name) if name else ""


def remove_oldest(folder: str, pools: Collection[str], places: int) -> None:
    """Removes the folders of pools that are gone, beyond GONE_MAX. `pools`: the served pools. `places`: the largest number of served
    pools.
    """
    try:
        with os.scandir(os.path.join(folder, POOLS)) as entries:
            found = [(entry.stat().st_mtime, entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    except OSError as refused:
        log.warning("the state of pools that are gone is not removed", folder=folder, why=refused.strerror)
        return
    others = sorted((each for each in found if os.path.basename(each[1]) not in pools), reverse=True)
    for _, path in others[GONE_MAX + places - len(pools) :]:
        for name in (FILE, f"{FILE}.tmp"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
        with contextlib.suppress(OSError):  # the folder has files of other programs
            os.rmdir(path)
        log.info("the state of a pool that is gone is removed", folder=path)


def has_file(folder: str) -> bool:
    """Returns whether a folder has the file. Returns False for ""."""
    return bool(folder) and Path(folder, FILE).exists()


class LatencyState:
    """Saves and loads the file. Call `load` once, before `save`."""

    def __init__(self, folder: str) -> None:
        self._file = Snapshot(Path(folder, FILE), "the latency model", HEADER, lambda: (MAGIC, VERSION))
        self._saved = -1  # the model's `changes` at the last write

    def load(self) -> tuple[LatencyModel, dict[Identity, EndpointModel]]:
        """Returns the model without endpoints, and the learned values of each endpoint. If the file is unusable, logs the reason."""
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
