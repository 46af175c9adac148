"""Asks the model servers themselves: whether their clocks agree, whether prefix caching is on, and how long a metrics page takes.

The picker's own findings say which endpoints refuse, are slow or lack metrics; this module finds what only the servers' answers show.
"""

import email.utils
import re
import ssl
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from workers.cli import http_page
from workers.cli.doctor.running import State, effective
from workers.process.credentials import tls_context
from workers.shared.doctor_report import ERROR, WARNING, Finding
from workers.supervisor.pages.state.pool_findings import fewer, in_pool, settings_of
from workers.supervisor.pages.state.prefix_findings import unreported

ASKED_MAX: Final = 32  # endpoints; in a larger pool, only some are asked
AT_ONCE: Final = 8
TIMEOUT_S: Final = 3.0
PAGE_BYTES_MAX: Final = 8 << 20
APART_S: Final = 5.0  # a header `Date` has whole seconds
NAMED_MAX: Final = 5
NAME_CHARS_MAX: Final = 64
CACHING_OFF: Final = re.compile(rb'^[\w:]*cache_config_info\{[^}\n]*enable_prefix_caching="(?:False|false|0)"', re.MULTILINE)
SOURCE: Final = "metrics-data-source"
OF_CLUSTERS: Final = "multicluster-metrics-data-source"


class Answer(NamedTuple):
    """The answer of a server. `failed`: why there is no page, or "". `ahead_s`: the server's clock minus ours, or None without a time."""

    endpoint: str
    address: str
    failed: str = ""
    seconds: float = 0.0
    ahead_s: float | None = None
    caching_off: bool = False


def server_findings(state: State) -> list[Finding]:
    """Asks up to ASKED_MAX endpoints of the state, AT_ONCE at the same time. Asks equally many endpoints of each of several pools, and none
    of the pools in `unasked`.
    """
    pages = _pages_of_pools(state)
    endpoints = _turns(each for each in state.get("endpoints", {}).values() if not pages[each.get("pool", "")].refused)[:ASKED_MAX]
    pools = list(dict.fromkeys(each.get("pool", "") for each in endpoints))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda each: _ask(each["name"], each["address"], pages[each.get("pool", "")]), endpoints))
    known = {each["address"] for each in unreported(state.get("endpoints", {}))}  # the picker itself reports that these may have no caching
    answers = [each._replace(caching_off=each.caching_off and each.address not in known) for each in answers]
    states = {each["address"]: each["state"] for each in endpoints}
    if not any(pools):
        return findings_of(answers, states)
    found = clock_findings(answers)
    for pool in pools:
        own = [answer for answer, each in zip(answers, endpoints, strict=True) if each["pool"] == pool]
        found += in_pool(pool, other_findings(own, states))
    return list(fewer(found))


def unasked(state: State) -> dict[str, str]:
    """Returns pool ("" if the picker has one pool) -> why this command cannot ask its endpoints as the picker does."""
    return {pool: pages.refused for pool, pages in _pages_of_pools(state).items() if pages.refused}


def _turns(endpoints: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the endpoints so that pools take turns: the first endpoint of each pool, then the second of each pool."""
    seen = Counter[str]()
    turn = []
    for each in endpoints:
        pool = each.get("pool", "")
        turn.append((seen[pool], each))
        seen[pool] += 1
    return [each for _, each in sorted(turn, key=lambda pair: pair[0])]


def findings_of(answers: Sequence[Answer], states: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about these answers. `states`: address -> the endpoint's state according to the picker."""
    return [*clock_findings(answers), *other_findings(answers, states)]


def clock_findings(answers: Sequence[Answer]) -> list[Finding]:
    """Returns the finding about clocks that differ."""
    found = []
    if which := [each for each in answers if each.ahead_s is not None and abs(each.ahead_s) > APART_S]:
        least, most = min(each.ahead_s or 0.0 for each in which), max(each.ahead_s or 0.0 for each in which)
        ours = len(which) == len([each for each in answers if each.ahead_s is not None]) and len(which) > 1
        found.append(
            Finding(
                "clock",
                WARNING,
                "The clock of this machine is wrong" if ours else f"The clock of {_servers(which)} is wrong",
                f"{_names(which)}: {' to '.join(dict.fromkeys((f'{least:+.0f}', f'{most:+.0f}')))} s against the clock here",
                "`timedatectl status` (or `chronyc tracking`) on the machine; certificates, leases and logs depend on the time",
            )
        )
    return found


def other_findings(answers: Sequence[Answer], states: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about servers that do not answer, or have no prefix caching. `states`: as for `findings_of`."""
    found = []
    if which := [each for each in answers if each.caching_off]:
        found.append(
            Finding(
                "prefix-caching-off",
                WARNING,
                f"Prefix caching is off in {_servers(which)}",
                f'{_names(which)}: the metrics page says enable_prefix_caching="False"',
                "start the engine with prefix caching (vLLM: --enable-prefix-caching)",
            )
        )
    if which := [each for each in answers if each.failed and states.get(each.address) == "fresh"]:
        found.append(
            Finding(
                "server-unreachable",
                ERROR,
                f"Not reachable from this command, but from the picker: {_servers(which)}",
                f"{_names(which)}: {which[0].failed}",
                "run `epp doctor` in the picker's container: a network policy may admit the picker only",
            )
        )
    return found


class _Pages(NamedTuple):
    """How metrics pages are asked for. `url`: from an endpoint's address. `refused`: why this command cannot ask for them, or ""."""

    url: Callable[[str], str]
    context: ssl.SSLContext | None
    refused: str


def _pages_of_pools(state: State) -> dict[str, _Pages]:
    """Returns how the endpoints of each pool are asked. Reads each configuration once, because pools share them."""
    known: dict[str, _Pages] = {}
    found: dict[str, _Pages] = {}
    for pool in dict.fromkeys(each.get("pool", "") for each in state.get("endpoints", {}).values()):
        text = (settings_of(state, pool) if pool else state.get("settings", {})).get("effective", "")
        if text not in known:
            known[text] = _pages(effective(state, pool))
        found[pool] = known[text]
    return found


def _pages(document: Mapping[str, Any]) -> _Pages:
    plugins: Sequence[Mapping[str, Any]] = document.get("plugins", ())
    parameters: Mapping[str, Any] = next((each.get("parameters", {}) for each in plugins if each["type"] == SOURCE), {})
    scheme, path = parameters.get("scheme") or "http", parameters.get("path") or "/metrics"
    port = parameters.get("port")
    context, refused = None, "their pages are those of other clusters" if any(each["type"] == OF_CLUSTERS for each in plugins) else ""
    if scheme == "https":
        try:  # the picker checks certificates as configured; this command only reads numbers
            context = tls_context(None, parameters.get("clientCertPath") or "", parameters.get("clientKeyPath") or "")
        except OSError as unreadable:
            refused = f"the picker's client certificate cannot be read here: {unreadable.strerror or unreadable}"

    def url(address: str) -> str:
        host = f"{address.rpartition(':')[0]}:{port}" if port else address
        return f"{scheme}://{host}{path if path.startswith('/') else '/' + path}"

    return _Pages(url, context, refused)


def _ask(name: str, address: str, pages: _Pages) -> Answer:
    begun = time.monotonic()
    try:
        page = http_page.get(pages.url(address), TIMEOUT_S, bytes_max=PAGE_BYTES_MAX, within_s=TIMEOUT_S, context=pages.context)
    except urllib.error.HTTPError as refused:
        return Answer(name, address, failed=str(refused))
    except (OSError, ValueError) as failed:  # includes URLError, whose text has brackets around the cause
        return Answer(name, address, failed=str(getattr(failed, "reason", failed)))
    return Answer(
        name,
        address,
        seconds=time.monotonic() - begun,
        ahead_s=_ahead_s(page.date, time.time()),
        caching_off=CACHING_OFF.search(page.content) is not None,
    )


def _ahead_s(told: str, now: float) -> float | None:
    """Returns how many seconds a server's time is ahead of `now`, or None if the header cannot be read."""
    try:
        return email.utils.parsedate_to_datetime(told).timestamp() - now
    except (TypeError, ValueError):
        return None


def _servers(which: Sequence[Answer]) -> str:
    return f"{len(which)} server{'' if len(which) == 1 else 's'}"


def _names(which: Sequence[Answer]) -> str:
    shown = ", ".join(f"{each.endpoint[:NAME_CHARS_MAX]} ({each.address})" for each in which[:NAMED_MAX])
    return shown + (f" and {len(which) - NAMED_MAX} more" if len(which) > NAMED_MAX else "")
