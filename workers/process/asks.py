"""Passes commands to a running picker: the command line writes a file into the run directory, and sends SIGHUP to the parent.

    command ─ put ─▶ <run directory>/<instance>.ask ─ SIGHUP ─▶ parent: take

The file appears whole, and never replaces the file of another command. The parent removes the file before it obeys the command.
It ignores files of other users, and files older than LATE_S, which a command has left behind.
"""

import contextlib
import os
import stat
import time
from typing import Final, Literal

import msgspec

from epp.decision.tryout import Share

SUFFIX: Final = ".ask"
BYTES_MAX: Final = 16 << 20
LATE_S: Final = 30.0  # an older file was left behind by a command that ended early

What = Literal["reload", "try", "promote", "rollback"]


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """One command. `pool`: the name of the pool to change; "" means the only pool, or for "reload" all pools.

    With "try", `text`, `source` and `share` describe the candidate: its YAML, its file, and which requests the candidate decides.
    """

    what: What
    text: str = ""
    source: str = ""
    share: Share = Share()
    pool: str = ""


class AskRefused(Exception):
    """Raised if a command cannot be stored, or if the parent refuses the command. The text says why."""


def path_of(run_dir: str, instance: str) -> str:
    """Returns the path of the file through which commands reach this instance."""
    return os.path.join(run_dir, instance + SUFFIX)


def put(run_dir: str, instance: str, ask: Ask) -> None:
    """Stores a command for the parent. The caller then sends SIGHUP. Raises AskRefused, and OSError if the file cannot be written."""
    blob = msgspec.msgpack.encode(ask)
    if len(blob) > BYTES_MAX:
        raise AskRefused(f"the configuration has {len(blob)} bytes; at most {BYTES_MAX} are possible")
    path = path_of(run_dir, instance)
    with contextlib.suppress(FileNotFoundError):
        if time.time() - os.lstat(path).st_mtime > LATE_S:
            os.unlink(path)
    own = f"{path}.{os.getpid()}"
    file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "wb") as writing:
            writing.write(blob)
        os.link(own, path)  # unlike a rename, it replaces no other command
    except FileExistsError:
        raise AskRefused("another command waits for the picker: try again") from None
    finally:
        os.unlink(own)


def take(run_dir: str, instance: str) -> Ask | None:
    """In the parent: removes and returns the waiting command. Returns None without a command, or if it is older than LATE_S.

    Raises AskRefused if the file cannot be read, belongs to another user, or was written by another version.
    """
    path = path_of(run_dir, instance)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as unreadable:
        raise AskRefused(f"{path} cannot be read: {unreadable.strerror}") from unreadable
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise AskRefused(f"{path} is not a file of this user")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if time.time() - about.st_mtime > LATE_S:
            return None
        return msgspec.msgpack.decode(os.read(file, BYTES_MAX + 1), type=Ask)
    except msgspec.MsgspecError as strange:
        raise AskRefused(f"{path} was written by another version: {strange}") from strange
    finally:
        os.close(file)
