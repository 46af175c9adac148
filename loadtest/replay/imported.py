"""Reads traces of public formats. They have no endpoints and no times, so servers are assumed, and answers take the time that these servers
need.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, get_args

import click
import numpy as np

from epp.recording.imports import Arrival
from epp.recording.records import Member
from epp.request import BYTES_PER_TOKEN
from loadtest.replay.reading import NAN, REQUESTS_MAX, Asked, Lifetime, Recording, Sight
from loadtest.replay.servers import UNBOUNDED, Form, Speed
from workers.cli.flags import Whole
from workers.shared.recording import Unreadable
from workers.shared.recording.reader import arrivals, is_recording

ENDPOINTS: Final = 8
PREFILL_US, DECODE_MS, CACHE_TOKENS = (100.0, 20.0, 400_000)  # estimates for a model with 70 billion parameters on several cards
OVERHEAD_S, GROWTH, STEP_TOKENS = 0.005, 0.005, 8_192

F = TypeVar("F", bound=Callable[..., Any])


class Assumed(NamedTuple):
    """The servers that are assumed for a trace without times; None for a value that is not given. `form`: the form of the model, one of
    `loadtest.replay.servers`.
    """

    form: Form | None = None
    prefill_us: float | None = None
    decode_ms: float | None = None
    cache_tokens: int | None = None

    def speed(self) -> Speed:
        return Speed(
            self.form or "steps",
            OVERHEAD_S,
            (self.prefill_us or PREFILL_US) * 1e-6,
            (self.decode_ms or DECODE_MS) * 1e-3,
            GROWTH,
            STEP_TOKENS,
            UNBOUNDED,
            self.cache_tokens or CACHE_TOKENS,
            0,
            0.0,
        )


NOTHING_ASSUMED: Final = Assumed()


def assumed_options(command: F) -> F:
    """Adds the options of `Assumed` to a command."""
    where = "of each server, for a trace without times"
    above_0 = click.FloatRange(0, min_open=True)
    options = (
        click.option(
            "--form", type=click.Choice(get_args(Form)), help=f"How it computes requests {where.replace('each', 'a')}. [default: steps]"
        ),
        click.option("--prefill-us", type=above_0, help=f"Microseconds per prompt token {where}. [default: 100]"),
        click.option("--decode-ms", type=above_0, help=f"Milliseconds per token of one answer {where}. [default: 20]"),
        click.option("--cache-tokens", type=Whole(1), help=f"Tokens in the cache {where}. [default: 400000]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def imported(path: str, endpoints: int | None, assumed: Assumed) -> tuple[Recording, list[Speed]] | None:
    """Reads a trace of a public format, and assumes its servers. Returns None if `path` is a recording. Raises Unreadable."""
    if is_recording(path):
        if assumed != NOTHING_ASSUMED:
            options = "--form, --prefill-us, --decode-ms and --cache-tokens"
            raise Unreadable(f"{path}: {options} are for traces without times; servers are fitted to a recording")
        return None
    asked = []
    for arrival in arrivals(path, lambda _: None):
        asked.append(_asked(arrival))
        if len(asked) > REQUESTS_MAX:
            raise Unreadable(f"{path}: more than {REQUESTS_MAX:,} requests: cut the file")
    if not asked:
        raise Unreadable(f"{path}: the trace has no requests")
    asked.sort(key=lambda each: each.at)
    size = endpoints or ENDPOINTS
    start = asked[0].at
    lifetimes = [Lifetime(_member(slot, start), start, float("inf"), ()) for slot in range(size)]
    return Recording(asked, lifetimes, [Sight() for _ in range(size)], {}, 0), [assumed.speed()] * size


def _member(slot: int, at: float) -> Member:
    address = f"192.0.2.{slot % 256}:{8000 + slot // 256}"
    return Member(at, True, slot, 0, "default", f"server-{slot}", address, {})


def _asked(arrival: Arrival) -> Asked:
    hashes = np.array(arrival.blocks, dtype=np.uint64).astype("<u8").tobytes()
    return Asked(
        arrival.at, arrival.model, "", 0, 0, None, True, arrival.prompt_tokens * BYTES_PER_TOKEN, None, arrival.prompt_tokens,
        arrival.block_tokens, hashes, (), (), 0.0, arrival.prompt_tokens, arrival.output_tokens, -1, NAN, NAN, None, 0, False,
    )  # fmt: skip
