"""Samples the stack of this worker while the supervisor waits for its profile.

The kernel sends SIGPROF for every 10 ms of CPU time of this process, so an idle worker has no samples. Python runs the handler between two
bytecodes, or before the event loop continues. The handler sees the stack of the main thread, which serves all requests. Time in C, such as
decoding JSON, is attributed to the Python function that called it. If the innermost function has not begun when the handler runs, the stack
does not have this function, because the time passed before it.

Compiled functions have no Python frames. Their time is attributed to the interpreted function that called them. For most of them that is
the event loop, so LOOP stands in profiles for the event loop and for compiled code. `EPP_COMPILED=0` runs a picker whose profile shows all
functions.

Without a question, no timer runs and no handler is installed.
"""

import asyncio
import dis
import signal
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

from workers.shared.profiles import HERTZ, Function, Profile, ProfileAnswering, Question

DEPTH_MAX: Final = 100  # limit for the functions of a stack; a deeper stack loses its outermost functions
STACKS_MAX: Final = 2000  # different stacks; samples of further stacks are only counted as missing
BEGINS: Final = dis.opmap["RESUME"]  # the first instruction of a function, and of a coroutine that continues
RUNNERS: Final = "asyncio.runners"  # the module whose function runs the event loop
LOOP: Final = Function("[event loop and compiled code]", "", 0)


class Sampler:
    """Counts the stacks at each signal."""

    def __init__(self) -> None:
        self.counts: dict[tuple[CodeType, ...], int] = {}
        self.left_out = 0
        self._modules: dict[CodeType, str] = {}

    def sample(self, _number: int, frame: FrameType | None) -> None:
        """Counts the stack of `frame`. It is the signal handler."""
        stack: list[CodeType] = []
        if frame is not None and frame.f_code.co_code[frame.f_lasti] == BEGINS:
            frame = frame.f_back
        while frame is not None and len(stack) < DEPTH_MAX:
            code = frame.f_code
            stack.append(code)
            if code not in self._modules:
                self._modules[code] = frame.f_globals.get("__name__", "?")
            frame = frame.f_back
        if not stack:
            return
        key = tuple(stack)
        if key in self.counts or len(self.counts) < STACKS_MAX:
            self.counts[key] = self.counts.get(key, 0) + 1
        else:
            self.left_out += 1

    def profile(self, worker: int, seconds: int) -> Profile:
        """Returns a profile of all counted stacks."""
        numbers: dict[Function, int] = {}
        stacks: list[tuple[list[int], int]] = []
        for codes, count in self.counts.items():
            functions = [self._function(code) for code in reversed(codes)]
            if self._modules[codes[0]] == RUNNERS:
                functions.append(LOOP)
            stacks.append(([numbers.setdefault(function, len(numbers)) for function in functions], count))
        return Profile(worker, seconds, list(numbers), stacks, self.left_out)

    def _function(self, code: CodeType) -> Function:
        return Function(f"{self._modules[code]}.{code.co_qualname}", code.co_filename, code.co_firstlineno)


class Profiler:
    """Answers the supervisor's questions for profiles of this worker."""

    def __init__(self, answering: ProfileAnswering, later: Callable[..., asyncio.TimerHandle]) -> None:
        """`later` is the event loop's `call_later`."""
        self._answering = answering
        self._later = later
        self._sampler: Sampler | None = None

    def woken(self) -> None:
        """Begins to sample if this worker was asked. Called after each wake-up."""
        if self._sampler is None and (question := self._answering.question()) is not None:
            self._sampler = Sampler()
            signal.signal(signal.SIGPROF, self._sampler.sample)
            signal.siginterrupt(signal.SIGPROF, False)
            signal.setitimer(signal.ITIMER_PROF, 1 / HERTZ, 1 / HERTZ)
            self._later(question.seconds, self._end, question)

    def close(self) -> None:
        """Ends sampling without an answer."""
        if self._sampler is not None:
            self._stop()

    def _stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        # with the default handler, a signal that is still on its way would end the process
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        self._sampler = None

    def _end(self, question: Question) -> None:
        sampler = self._sampler
        if sampler is None:
            return
        self._stop()
        self._answering.publish(question, sampler.profile(question.worker, question.seconds))
        self.woken()  # the supervisor may have asked again meanwhile
