"""Serves CPU profiles of workers, as the reference picker does with `net/http/pprof`.

    /debug/pprof/profile   pprof's profile.proto, for `go tool pprof` and other tools that read this format
    /debug/profile         one line for each stack, `outermost;…;innermost count`, for flame graph tools

    ?worker=N    the worker; by default the first worker that serves
    ?seconds=N   how long to sample, 1 to 60; by default 30, as in Go

A profile shows names of functions and no data of requests. It interrupts the worker 100 times a second, for a short time.
`--enable-pprof=false` removes the pages. The picker makes one profile at a time.
"""

import math
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Final

from epp.protocol.codec.fields import field, varint
from workers.shared.profiles import HERTZ, SECONDS_MAX, Busy, NotServing, Profile, ProfileAsking, Question
from workers.supervisor.pages.page import PLAIN, PageAnswer, Pause, Piece, Request, refusal

SECONDS: Final = 30
LOOK_AGAIN_S: Final = 0.05
BINARY: Final = "application/octet-stream"
NANOSECONDS: Final = 1_000_000_000 // HERTZ  # the CPU time for which one sample stands
LEFT_OUT: Final = "[stacks that did not fit]"

Form = tuple[Callable[[Profile], bytes], str]


class ProfilePage:
    """Makes the profile page of one format. The pages of both formats share one `Asking`."""

    def __init__(self, asking: ProfileAsking, form: Form) -> None:
        """`form`: the encoder of the profile, and its content type."""
        self._asking = asking
        self._encode, self._content_type = form

    def __call__(self, request: Request) -> PageAnswer:
        seconds, worker = request.values("seconds", "worker")
        if seconds and not _number(seconds, 1, SECONDS_MAX):
            return refusal(HTTPStatus.BAD_REQUEST, f"seconds must be a number from 1 to {SECONDS_MAX}")
        if worker and not _number(worker, 0, 1 << 11):
            return refusal(HTTPStatus.BAD_REQUEST, "worker must be the number of a worker, from 0")
        if request.method == "HEAD":
            return PageAnswer(b"", self._content_type)
        try:
            first = min(self._asking.serving(), default=0)
            question = self._asking.ask(int(worker) if worker else first, int(seconds or SECONDS))
        except Busy as busy:
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(busy), (("Retry-After", str(math.ceil(busy.seconds))),))
        except NotServing as problem:
            return refusal(HTTPStatus.NOT_FOUND, str(problem))
        return PageAnswer(self._body(question), self._content_type)

    def _body(self, question: Question) -> Iterator[Piece]:
        while (profile := self._asking.answer(question)) is None:
            yield Pause(LOOK_AGAIN_S)
        yield self._encode(profile)


def _number(text: str, least: int, most: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6 and least <= int(text) <= most


def collapsed(profile: Profile) -> bytes:
    """Encodes the stacks as lines for flame graph tools."""
    names = [function.name for function in profile.functions]
    lines = [f"{';'.join(names[number] for number in stack)} {count}\n" for stack, count in profile.stacks]
    if profile.left_out:
        lines.append(f"{LEFT_OUT} {profile.left_out}\n")
    return "".join(sorted(lines)).encode()


def pprof(profile: Profile) -> bytes:
    """Encodes the profile as a perftools.profiles.Profile.

    Source of the field numbers: proto/profile.proto in github.com/google/pprof. Each function has one location.
    """
    texts: dict[str, int] = {"": 0}

    def text(value: str) -> int:
        return texts.setdefault(value, len(texts))

    def value_type(kind: str, unit: str) -> bytes:
        return _int(1, text(kind)) + _int(2, text(unit))

    data = field(1, value_type("samples", "count")) + field(1, value_type("cpu", "nanoseconds"))
    functions = [(f.name, f.file, f.line) for f in profile.functions] + [(LEFT_OUT, "", 0)]
    stacks = [*profile.stacks, *([([len(functions) - 1], profile.left_out)] if profile.left_out else [])]
    for stack, count in stacks:  # pprof lists the innermost location first
        locations = b"".join(_int(1, number + 1) for number in reversed(stack))
        data += field(2, locations + _int(2, count) + _int(2, count * NANOSECONDS))
    for number, (name, file, line) in enumerate(functions, 1):
        data += field(4, _int(1, number) + field(4, _int(1, number) + _int(2, line)))
        data += field(5, _int(1, number) + _int(2, text(name)) + _int(3, text(name)) + _int(4, text(file)) + _int(5, line))
    data += _int(10, profile.seconds * 1_000_000_000) + field(11, value_type("cpu", "nanoseconds")) + _int(12, NANOSECONDS)
    return data + b"".join(field(6, value.encode()) for value in texts)


def _int(number: int, value: int) -> bytes:
    """Encodes a varint field of a protobuf message. `number`: the number of the field."""
    return varint(number << 3) + varint(value)


COLLAPSED: Final[Form] = (collapsed, PLAIN)
PPROF: Final[Form] = (pprof, BINARY)
