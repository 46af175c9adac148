"""Locks the folder of --state-dir, so that no two pickers write their snapshots over each other's.

The parent takes the lock before it forks. Children inherit it with the open file, so a folder is free when the last process of its picker
has ended, however it ended. The file stays: only the lock on it counts.
"""

import fcntl
import io
import os
import socket
from typing import TYPE_CHECKING, Final

import structlog

from workers.process import StartError

if TYPE_CHECKING:
    from workers.host.options import Options

NAME: Final = "lock"
HOLDER_BYTES_MAX: Final = 512

log = structlog.get_logger()


def locked(options: "Options") -> io.FileIO | None:
    """Locks the state folder until the file that it returns is closed. Returns None without a folder.

    Also returns None if the folder cannot be locked, and logs that. Raises StartError if another picker uses it.
    """
    if not options.state_dir:
        return None
    path = os.path.join(options.state_dir, NAME)
    try:
        os.makedirs(options.state_dir, mode=0o700, exist_ok=True)
        file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    except OSError as refused:  # the parts that write there say what this means for them
        log.warning("--state-dir cannot be locked: no other picker may use it", file=path, why=refused.strerror)
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{options.instance} on {socket.gethostname()}".encode()[:HOLDER_BYTES_MAX])
    except BlockingIOError:
        with file:
            holder = file.read(HOLDER_BYTES_MAX).decode(errors="replace") or "another picker"
        raise StartError(
            f"--state-dir {options.state_dir} is used by {holder} (its lock {path} is held): stop that picker, or give each picker a "
            "folder of its own"
        ) from None
    except OSError as refused:  # a file system without locks, or a full one
        log.warning("--state-dir may not be locked: no other picker may use it", file=path, why=refused.strerror)
    return file
