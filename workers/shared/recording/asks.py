"""How `epp record` asks a running picker: one file for the question, and one for the state of the recording, in the run directory.

    command ── <instance>.record ──▶ supervisor            it looks twice a second, and removes the file
    command ◀── <instance>.<id>.recording ── supervisor    it replaces the file every second, and at the end; the command removes it

The supervisor ignores files of other users. At its start it removes the files that commands have left behind.
"""

import contextlib
import glob
import os
import stat
from typing import Final, Literal

import msgspec

SUFFIX: Final = ".record"
STATE_SUFFIX: Final = ".recording"
BYTES_MAX: Final = 1 << 16


class RecordAsk(msgspec.Struct, frozen=True):
    """Asks for a recording of `seconds` into `folder`, an absolute path; 0 seconds end the recording with this `id`.

    `pool`: the name of the only pool to record; "" means all pools.
    """

    id: str
    folder: str
    seconds: float
    pool: str = ""


class RecordingState(msgspec.Struct, frozen=True):
    """The state of the recording that `id` asked for. `why`: the reason if `state` is "failed". `left_s`: seconds until its end."""

    id: str
    state: Literal["recording", "ended", "failed"]
    why: str = ""
    left_s: float = 0.0
    records: int = 0
    bytes: int = 0
    lost: int = 0
    files: list[str] = []


def put(run_dir: str, instance: str, ask: RecordAsk) -> None:
    """Stores a question. Raises OSError if the file cannot be written."""
    _replace(os.path.join(run_dir, instance + SUFFIX), msgspec.json.encode(ask))


def take(run_dir: str, instance: str) -> RecordAsk | None:
    """Removes and returns the waiting question. Returns None without a question of this user."""
    path = os.path.join(run_dir, instance + SUFFIX)
    data = _own(path)
    if data is None:
        return None
    with contextlib.suppress(OSError):
        os.unlink(path)
    try:
        ask = msgspec.json.decode(data, type=RecordAsk)
    except msgspec.MsgspecError:
        return None
    return ask if ask.id.isalnum() else None  # the id becomes part of a file's name


def tell(run_dir: str, instance: str, state: RecordingState) -> None:
    """Publishes the state. If the run directory is full, the previous state stays."""
    with contextlib.suppress(OSError):
        _replace(_state_path(run_dir, instance, state.id), msgspec.json.encode(state))


def told(run_dir: str, instance: str, id: str) -> RecordingState | None:
    """Returns the state of the recording that `id` asked for, or None without such a recording."""
    data = _own(_state_path(run_dir, instance, id))
    try:
        return None if data is None else msgspec.json.decode(data, type=RecordingState)
    except msgspec.MsgspecError:
        return None


def forget(run_dir: str, instance: str, id: str = "*") -> None:
    """Removes the state of a recording, or without an `id` the states of all recordings."""
    for path in glob.glob(_state_path(glob.escape(run_dir), glob.escape(instance), id)):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _state_path(run_dir: str, instance: str, id: str) -> str:
    return os.path.join(run_dir, f"{instance}.{id}{STATE_SUFFIX}")


def _own(path: str) -> bytes | None:
    """Returns the content of a file of this user, or None without such a file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(file, "rb") as reading:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            return None
        return reading.read(BYTES_MAX)


def _replace(path: str, data: bytes) -> None:
    own = f"{path}.{os.getpid()}"
    file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "wb") as writing:
        writing.write(data)
    os.replace(own, path)
