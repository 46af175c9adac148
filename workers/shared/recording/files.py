"""Writes the files of a recording, in a thread, so that a slow disk does not stop the supervisor's event loop.

    supervisor ─ put ─▶ queue of at most QUEUED_MAX frames ─▶ thread: compress, append

A frame is appended with one write. If the write fails, the file is cut back to its last whole frame, and the frame's records are lost. If
the queue is full, a frame is lost, too. This module does not wait for the disk to sync: after the end of a process, the kernel still has
the bytes.

The oldest files of the instance are removed if the number or the total size of all files is too large.
"""

import contextlib
import errno
import os
import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import Final

from workers.shared.recording import Frame, Limits
from workers.shared.recording.framing import Packer, head

SUFFIX: Final = ".epprec"
QUEUED_MAX: Final = 64
END_S: Final = 5.0  # how long `end` waits for the thread
NUMBER: Final = r"-\d{8}T\d{6}-\d+"


class RecordFiles:
    """The files of one recording in a folder.

    The thread counts: `records` and `bytes` written, records `lost` because of the disk, and `why`. `size`: bytes of the newest file.
    `names`: the files of this recording that exist. `limits`: the bounds of the recording.
    """

    def __init__(self, folder: str, instance: str, limits: Limits) -> None:
        """Raises OSError if the folder cannot be created or written, or belongs to another user."""
        self.folder = folder
        self.size = self.records = self.bytes = self.lost = 0
        self.why = ""
        self.names: list[str] = []
        self._instance = instance
        self.limits = limits
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        self._open: dict[int, tuple[int, int]] = {}  # number of a file -> its descriptor, its size
        self._packer = Packer()
        self._queue: queue.Queue[Frame | None] = queue.Queue(QUEUED_MAX)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> bool:
        """Queues a frame. Returns False if the queue is full; then the frame's records are lost."""
        try:
            self._queue.put_nowait(frame)
        except queue.Full:
            return False
        return True

    def end(self) -> None:
        """Waits until all queued frames are written, and closes the files. Gives up after END_S."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=END_S)
        self._thread.join(END_S)

    def _run(self) -> None:
        while (frame := self._queue.get()) is not None:
            try:
                self._take(frame)
            except OSError as refused:
                self.lost += frame.records
                self.why = refused.strerror or str(refused)
        for descriptor, _ in self._open.values():
            os.close(descriptor)

    def _take(self, frame: Frame) -> None:
        if frame.content is None:
            found = self._open.pop(frame.file, None)
            if found is not None:
                os.close(found[0])
            return
        if frame.file not in self._open:
            self._create(frame.file)
        descriptor, size = self._open[frame.file]
        packed = self._packer.pack(frame.content, frame.records)
        try:
            done = os.write(descriptor, packed)
            if done < len(packed):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
        self._open[frame.file] = descriptor, size + done
        if frame.file == max(self._open):
            self.size = size + done
        self.records += frame.records
        self.bytes += done

    def _create(self, number: int) -> None:
        at = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = os.path.join(self.folder, f"{self._instance}-{at}-{number}{SUFFIX}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            begin = head()
            if os.write(descriptor, begin) < len(begin):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        self._open[number] = descriptor, len(begin)
        self.size = len(begin)
        self.names.append(path)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Removes the oldest files of this instance that are above the limits, but never the newest one."""
        limits = self.limits
        count = total = 0
        for _, size, path in sorted(self._existing(), reverse=True):
            count, total = count + 1, total + size
            above = count > limits.files or total + limits.file_bytes > limits.bytes
            if above and path != self.names[-1]:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                if path in self.names:
                    self.names.remove(path)

    def _existing(self) -> Iterator[tuple[float, int, str]]:
        pattern = re.compile(re.escape(self._instance) + NUMBER + re.escape(SUFFIX))
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    yield about.st_mtime, about.st_size, entry.path
