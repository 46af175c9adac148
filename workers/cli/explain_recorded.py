"""Finds decisions by request id, time, tenant or endpoint for `epp explain`: among the decisions that workers remember, and in the small
recording.

The picker reports where its files are, and the number that stands for a tenant. This command reads the files itself, so it must run on the
picker's machine as the picker's user.
"""

import datetime
import functools
import heapq
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import click
import msgspec

from epp.decision.explain import Explanation
from epp.recording.keys import id_hash
from epp.recording.records import Record
from epp.recording.trace import Trace, Traced, requests
from workers.cli.explain_trace import has_id, why_then
from workers.cli.metrics_port import MetricsPort
from workers.cli.which import pool_option
from workers.shared.recording import Unreadable
from workers.shared.recording.reader import batches_of
from workers.supervisor.pages.decisions import Recorded

AGO: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
DAY_S: Final = 86_400.0
# The time until an ended request is in the file: workers keep records for a heartbeat, and the supervisor keeps a frame for a second.
WRITTEN_S: Final = 2.5


class Wanted(NamedTuple):
    """The wanted decisions. `at`: seconds since the epoch; None for the newest decisions. An empty field matches every request."""

    request_id: str = ""
    at: float | None = None
    flow: str = ""
    endpoint: str = ""
    pool: str = ""

    def remembered(self, decisions: Sequence[Explanation], now: float) -> list[Explanation]:
        """Returns the wanted decisions among those that workers remember, the best first. `now`: seconds since the epoch."""
        wanted = [each for each in decisions if self._fits(each)]
        if self.at is None:
            return wanted
        ago = now - self.at
        return sorted(wanted, key=lambda each: abs(each.ago_s - ago))

    def _fits(self, decision: Explanation) -> bool:
        if (self.flow and decision.flow != self.flow) or (self.pool and decision.pool != self.pool):
            return False
        names = {one.endpoint for run in decision.profiles for one in run.candidates if one.address in decision.targets}
        return not self.endpoint or self.endpoint in (*decision.targets, *names)

    def __str__(self) -> str:
        parts = [
            f"of flow {self.flow}" if self.flow else "",
            f"at {self.endpoint}" if self.endpoint else "",
            f"in pool {self.pool}" if self.pool else "",
        ]
        return " ".join(["on a request", *filter(None, [self.request_id, *parts])])


def wanted_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that describe the wanted decision. The command then gets a `Wanted` object."""

    @click.option("--request-id", default="", help="The decision on the request with this x-request-id.")
    @click.option("--at", "time_text", default="", help="The one next to this time: 10m (ago), 18:05, 2026-01-31T18:05 (UTC).")
    @click.option("--flow", default="", help="Decisions on requests of this tenant (fairness id).")
    @click.option("--endpoint", default="", help="Decisions for this endpoint: its name, or host:port.")
    @pool_option
    @functools.wraps(command)
    def with_wanted(*args: Any, request_id: str, time_text: str, flow: str, endpoint: str, pool: str, **others: Any) -> None:
        at = moment(time_text, time.time()) if time_text else None
        command(*args, wanted=Wanted(request_id, at, flow, endpoint, pool), **others)

    return with_wanted


def moment(text: str, now: float) -> float:
    """Returns the time that a text names, in seconds since the epoch: `10m` (ago), `18:05`, `18:05:30`, or a date and time. Raises
    UsageError.

    `now`: seconds since the epoch. Times without an offset are UTC. A time of day means the last time before `now`.
    """
    if ago := AGO.fullmatch(text):
        return now - float(ago[1]) * SECONDS[ago[2]]
    try:
        if text[2:3] == ":" or "-" not in text:
            of_day = datetime.time.fromisoformat(text)
            zone = of_day.tzinfo or datetime.UTC
            today = datetime.datetime.fromtimestamp(now, zone).date()
            found = datetime.datetime.combine(today, of_day, zone).timestamp()
            return found if found <= now else found - DAY_S
        found_at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"--at '{text}' is no time: write 10m (ago), 18:05 or 2026-01-31T18:05:30 (UTC)") from None
    return (found_at if found_at.tzinfo else found_at.replace(tzinfo=datetime.UTC)).timestamp()


def explained(port: MetricsPort, wanted: Wanted, count: int) -> list[Explanation]:
    """Returns the explanations of up to `count` recorded decisions: those nearest to `wanted.at`, or the newest ones. Raises
    ClickException.
    """
    query = urllib.parse.urlencode({"flow": wanted.flow})
    recorded = port.read(f"/debug/decisions/recorded?{query}", msgspec.json.Decoder(Recorded).decode)
    if not recorded.folder:
        raise click.ClickException(f"no worker remembers a decision {wanted}, and nothing is recorded: {recorded.why}")
    matches = _matching(wanted, recorded.flow)
    for pause_s in (0.0, WRITTEN_S):
        time.sleep(pause_s)
        try:
            found, trace = _found(batches_of(recorded.folder, lambda _: None), matches, wanted.at, count)
        except Unreadable as wrong:
            raise click.ClickException(f"no worker remembers a decision {wanted}, and {wrong}") from wrong
        if found:
            return [why_then(request, trace) for request in found]
    raise click.ClickException(f"neither a worker nor the recording in {recorded.folder} has a decision {wanted}")


def _matching(wanted: Wanted, flow: int) -> Callable[[Traced], bool]:
    hashed = id_hash(wanted.request_id)

    def matches(request: Traced) -> bool:
        if wanted.request_id and not has_id(request, wanted.request_id, hashed):
            return False
        if wanted.pool and request.decided.pool != wanted.pool:
            return False
        if wanted.flow and request.decided.flow != flow:
            return False
        target = request.target() if wanted.endpoint else None
        return not wanted.endpoint or (target is not None and wanted.endpoint in (target.name, target.address))

    return matches


def _found(batches: Iterator[list[Record]], matches: Callable[[Traced], bool], at: float | None, count: int) -> tuple[list[Traced], Trace]:
    """Returns up to `count` matching requests, the best first, and the whole recording."""
    trace = Trace()
    found = enumerate(filter(matches, requests(batches, trace)))
    ranked = ((request.at if at is None else -abs(request.at - at), number, request) for number, request in found)
    return [request for _, _, request in heapq.nlargest(count, ranked)], trace
