"""The signals of the parent. Handlers only count signals and wake up the parent, which acts on the signals between two waits.

The kernel merges signals of one kind that arrive faster than they are handled: a hundred SIGTTIN in a millisecond may arrive as one.
"""

import contextlib
import os
import select
import signal
from collections import Counter
from collections.abc import Iterator
from types import FrameType

from workers.process import fork

POLL_MAX_S = 0.5
CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Blocks signals while names are created. A signal that came before `Signals.catch` would end the process and leave the names."""
    signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


class Signals:
    """Counts signals until they are taken. `descriptors`: the descriptors of this object, which no child may hold."""

    def __init__(self, reports: int) -> None:
        """`reports`: the descriptor with the reports of children, which end a wait, too."""
        self.descriptors = self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pending: Counter[int] = Counter()
        self._poll = select.poll()
        for descriptor in (self._woken, reports):
            self._poll.register(descriptor, select.POLLIN)

    def catch(self) -> None:
        """Begins to count. Counts the signals that arrived before, too."""
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        for number in CAUGHT:
            signal.signal(number, self._count)
        for number in fork.MEANINGLESS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)

    def wait(self, seconds: float) -> None:
        """Waits for a signal or a report, for at most POLL_MAX_S."""
        self._poll.poll(min(seconds, POLL_MAX_S) * 1000.0)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass

    def taken(self) -> Counter[int]:
        """Returns how many signals of each kind have come since the last call."""
        pending, self._pending = self._pending, Counter()
        return pending

    def _count(self, number: int, _frame: FrameType | None) -> None:
        self._pending[number] += 1
