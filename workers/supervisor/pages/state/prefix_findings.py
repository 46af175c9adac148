"""Finds faults of prefix caches and of the picker's knowledge about them. Pure, as `findings`."""

from collections.abc import Iterator, Mapping
from typing import Final

from epp.metrics.kv_events import REPLAYS_FAILED
from epp.metrics.request_series import SALT_IGNORED
from epp.plugins.producers.tokenizer import OF_REQUESTS, WITHOUT_TOKENS
from epp.prefix.streams import COOLING, LOST, NAMELESS, NO_EVENTS, NOT_CONNECTED, OTHER_TOPIC
from workers.shared.doctor_report import ERROR, WARNING, Finding
from workers.supervisor.pages.state.finding_texts import Values, names, recent_answers, some
from workers.supervisor.pages.state.look import counts_of

APART: Final = 0.25  # a larger difference between the predicted and the reported share of a prompt is a finding
# Predictions of fewer blocks of a server than this prove nothing: they may be of a block that it did not fill.
BLOCKS_BEYOND: Final = 2
IGNORED_MIN: Final = 3  # answers; one alone may be of a prefix that the picker has forgotten
UNKNOWN_BLOCK_TOKENS: Final = 1024  # at least the block of a server that does not report its size
# Why KV events are not read -> what to do. Other reasons pass by themselves, or need no fix.
UNREAD_EVENTS: Final = dict.fromkeys(
    (NOT_CONNECTED, LOST, NO_EVENTS),
    "compare socketPort with the port in the server's --kv-events-config; `epp doctor --kv-events HOST` connects as the picker does",
) | {
    OTHER_TOPIC: "`epp doctor --kv-events HOST` shows the server's topic: set topicFilter to its beginning",
    NAMELESS: "upgrade the engine: newer ones also give the names of adapters",
    COOLING: "set replaySocketPort, and replay_endpoint in the servers' --kv-events-config",
}


def without_tokens(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for labels, count in counts_of(values.get("recent", {}), WITHOUT_TOKENS).items():
        server, _, reason = labels.partition(" ")
        if server:
            what, _, fix = reason.partition(": ")
            yield Finding(
                "tokens",
                WARNING if what.startswith(OF_REQUESTS) else ERROR,
                f"{server} gives no tokens, so prefixes are matched approximately",
                f"{what}: {some(count, 'time')} in the last minutes",
                fix,
            )


def kv_events(values: Values, endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    by_reason: dict[str, list[Values]] = {}
    for each in endpoints.values():
        why = each.get("not_precise")
        # A server that reports no cached tokens may have had no prompt of a whole block, so that there is nothing to tell.
        if why in UNREAD_EVENTS and each["state"] == "fresh" and (why != NO_EVENTS or each.get("reported_share")):
            by_reason.setdefault(why, []).append(each)
    for why, which in by_reason.items():
        yield Finding(
            "kv-events",
            WARNING,
            f"{some(len(which), 'endpoint')} whose KV events are not read, so prefixes are matched approximately",
            f"{names(which)}: {why}",
            UNREAD_EVENTS[why].replace("HOST", which[0]["address"].rpartition(":")[0]),
        )
    if failed := values.get("recent", {}).get(REPLAYS_FAILED.name, 0):
        yield Finding(
            "kv-replay",
            WARNING,
            "Missed KV events cannot be had again",
            f"{some(failed, 'replay')} without an answer or without an end in the last minutes",
            "compare replaySocketPort with the replay_endpoint of the servers' --kv-events-config",
        )


def salts_ignored(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    number, shown = recent_answers(values, SALT_IGNORED, IGNORED_MIN)
    if number:
        yield Finding(
            "cache-salt",
            WARNING,
            f"{some(number, 'endpoint')} where tenants seem to share cached prefixes in spite of cacheSalt",
            f"{shown} in the last minutes had cached tokens of a prompt that only other tenants had sent",
            "use an engine and an API that know the cache salt (docs/tenants.md#private-prefixes), or do not let tenants reach this API",
        )


def block_sizes(_values: Values, endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    by_size: dict[float, list[Values]] = {}
    for each in endpoints.values():
        if (size := each["scraped"].get("cache_block_size")) is not None:
            by_size.setdefault(size, []).append(each)
    if len(by_size) > 1:
        (usual, most), *others = sorted(by_size.items(), key=lambda item: (-len(item[1]), item[0]))
        shown = "; ".join(f"{size:g} tokens: {names(which)}" for size, which in others)
        yield Finding(
            "block-sizes",
            WARNING,
            "Endpoints have KV caches with different block sizes",
            f"{some(len(most), 'endpoint')} with {usual:g} tokens; {shown}",
            "start all servers of the pool with the same --block-size",
        )


def unreported(endpoints: Mapping[str, Values]) -> list[Values]:
    """Returns the endpoints that report no cache hits although many were predicted."""
    return [
        each
        for each in endpoints.values()
        if each.get("predicted_share", 0.0) - each.get("reported_share", 0.0) > APART
        and not each.get("reported_share")
        and each.get("predicted_tokens", 0.0) > BLOCKS_BEYOND * each["scraped"].get("cache_block_size", UNKNOWN_BLOCK_TOKENS)
    ]


def caching_off(_values: Values, endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    if which := unreported(endpoints):
        yield Finding(
            "prefix-caching",
            WARNING,
            f"{some(len(which), 'endpoint')} without prefix caching",
            f"hits of more than {BLOCKS_BEYOND} blocks were predicted, and none reported: {names(which)}",
            "start the engine with prefix caching, and let it report cached tokens (vLLM: --enable-prompt-tokens-details)",
        )
