"""Keeps the secret seed of block hashes over restarts of the picker, in a file of mode 0600 in `--state-dir`."""

import contextlib
import os
import stat
from pathlib import Path

import structlog

SECRET = "prefix-secret"
SECRET_BYTES = 32
SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4096

log = structlog.get_logger()


def kept_secret(folder: str) -> bytes:
    """Returns the secret in the folder. Creates the secret if the folder has none. If the file cannot be read or written, returns a new
    secret and logs a warning.
    """
    path = Path(folder, SECRET)
    try:
        secret = _read_secret(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # if the folder is unusable, the write below reports it
    except OSError as refused:
        log.warning("secret of --state-dir cannot be read: this picker uses a new one", file=str(path), why=refused.strerror)
        return os.urandom(SECRET_BYTES)
    else:
        if len(secret) >= SECRET_BYTES_MIN:
            return secret
        log.warning("secret of --state-dir is too short: the picker replaces it", file=str(path), size=len(secret))
    secret = os.urandom(SECRET_BYTES).hex().encode()
    try:
        replace_file(path, secret)
    except OSError as refused:
        log.warning("secret of --state-dir cannot be written: each restart uses a new one", file=str(path), why=refused.strerror)
    return secret


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            with contextlib.suppress(OSError):  # the volume is read-only, or the file has another owner
                os.fchmod(descriptor, 0o600)
        return os.read(descriptor, SECRET_BYTES_MAX).strip()
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the content of a file atomically. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = create_private(temporary)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


def create_private(path: Path) -> int:
    """Creates a file of mode 0600, and its folder if needed. Removes an old file. Returns a descriptor. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
