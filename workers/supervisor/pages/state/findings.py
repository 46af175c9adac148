"""Finds faults in a state, with evidence and fix. This is pure code: the same rules serve the page and commands.

A rule is a function from the state to findings. Their order is the order of the page: errors first.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from epp.metrics.request_series import USAGE_BEYOND_BOUNDS
from epp.plugins.extractors._pages import REFUSED_PAGE, UNREAD_VALUES
from workers.shared.doctor_report import ERROR, NOT_ALLOWED, WARNING, Finding
from workers.supervisor.pages.state.finding_texts import Values, cause, names, recent_answers, singular, some
from workers.supervisor.pages.state.pool_findings import by_pool, fewer, in_pool, unserved
from workers.supervisor.pages.state.prefix_findings import block_sizes, caching_off, kv_events, salts_ignored, without_tokens

SHOWN_AS: Final = {"on trial": "ejected"}  # the endpoint gets only one request
LAG_S: Final = 0.2
GIVEN_UP_MIN: Final = 10
GIVEN_UP_SHARE: Final = 0.1
HOT_SHARE: Final = 0.5
HOT_WAITING: Final = 8
RESTARTS_MIN: Final = 2
WORKERS_MIN: Final = 2  # no more than needed to survive the loss of one, even with one CPU
FREE_SHARE_MIN: Final = 0.1
FOREIGN_SHARE: Final = 0.2  # share of the metrics pages
FREE_BYTES_MIN: Final = 16 << 20
BEYOND_MIN: Final = 3  # answers
DAY_S: Final = 86_400
# Warnings about possible problems, which are no faults yet.
ADVICE: Final = ("prefix-outweighs-load",)


def findings(values: Values, endpoints: Mapping[str, Values]) -> list[Finding]:
    """Returns all findings about a state, errors first. `values`, `endpoints`: as in `frames.State`."""
    several = "pools" in values
    pools = list(by_pool(values, endpoints)) if several else []
    found: list[Finding] = []
    for rule in RULES:
        if several and rule in OF_POOL:
            found += [each for name, own, members in pools for each in in_pool(name, rule(own, members))]
        else:
            found += rule(values, endpoints)
    return sorted(fewer(found) if several else found, key=lambda finding: finding.severity != ERROR)


def _no_endpoints(_values: Values, endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    if not endpoints:
        yield Finding(
            "no-endpoints",
            ERROR,
            "The pool has no endpoints",
            "discovery has found none",
            "compare the selector of the InferencePool with the labels of the pods, or look at the endpoints file",
        )


def _unusable(_values: Values, endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for state, severity, what, fix in (
        ("down", ERROR, "refuse connections", "look at the server's log; try `curl http://ADDRESS/metrics` from here"),
        ("ejected", ERROR, "fail their requests", "look at the log of the server"),
        ("failing", WARNING, "fail more of their requests than the others", "look at the log of the server"),
        (
            "stale",
            WARNING,
            "have old metrics, so the picker estimates their load",
            "time `curl http://ADDRESS/metrics`; the log line 'endpoint stale' has the cause",
        ),
        (
            "unknown",
            WARNING,
            "have never been scraped successfully",
            "check port, path and TLS of the metrics page: `curl http://ADDRESS/metrics`",
        ),
    ):
        which = [
            each
            for each in endpoints.values()
            if SHOWN_AS.get(each["state"], each["state"]) == state and not each.get("why", "").startswith(REFUSED_PAGE)
        ]
        if which:
            yield Finding(
                f"endpoints-{state}",
                severity,
                f"{some(len(which), 'endpoint')} {what if len(which) > 1 else singular(what)}",
                f"{state}: {names(which)}{cause(which)}",
                fix.replace("ADDRESS", which[0]["address"]),
            )


def _unread_pages(_values: Values, endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for begins, rule, severity, what in (
        (REFUSED_PAGE, "missing-metrics", ERROR, "without what the picker reads"),
        (UNREAD_VALUES, "metrics-absent", WARNING, "with values that cannot be read, which are treated as unknown"),
    ):
        which = [each for each in endpoints.values() if each.get("why", "").startswith(begins)]
        if which:
            yield Finding(
                rule,
                severity,
                f"{some(len(which), 'metrics page')} {what}",
                f"{names(which)}{cause(which)}",
                "set the label llm-d.ai/engine-type of the pod to its engine, or name its metrics in engineConfigs, and leave those empty "
                f"that it does not have (docs/data-sources.md): `curl -s http://{which[0]['address']}/metrics`",
            )


def _implausible(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    number, shown = recent_answers(values, USAGE_BEYOND_BOUNDS, BEYOND_MIN)
    if number:
        yield Finding(
            "usage",
            WARNING,
            f"{some(number, 'endpoint')} with more reported tokens than the answers can have",
            f"{shown} in the last minutes; tokens beyond what is possible are not charged",
            "compare `usage` in an answer with its text: the server counts wrongly, or does not send all that it generates",
        )


def _workers(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for worker in values["workers"]:
        name = f"worker {worker['worker']}"
        if worker["state"] == "not serving":
            yield Finding("worker-away", ERROR, f"{name} does not serve", f"{worker['starts']} starts", "look at the picker's log")
        if worker.get("loop_lag_s", 0.0) > LAG_S:
            lag = f"its event loop is {worker['loop_lag_s']:g} s late"
            yield Finding("worker-late", WARNING, f"{name} is overloaded", lag, "give the picker more CPU: `epp size`")
    for name, process in values.get("processes", {}).items():
        bad = {cause: n for cause, n in process.get("exits", {}).items() if cause not in ("done", "memory")}
        if sum(bad.values()) >= RESTARTS_MIN:
            causes = ", ".join(f"{count} by {cause}" for cause, count in bad.items())
            yield Finding("restarts", WARNING, f"{name} has ended unexpectedly", causes, "look at the picker's log")


def _supervisor(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    if not values["supervisor"].get("serving", True):
        yield Finding("supervisor", ERROR, "The supervisor is away", "it does not serve", "look at the picker's log")
    recent = values.get("recent", {})
    late, taken = recent.get("scrapes_skipped_total", 0), recent.get("scrapes_total", 0)
    if late and late > taken / 20:
        yield Finding(
            "scrapes-late",
            WARNING,
            "Metrics pages are slower than the scrape interval",
            f"{late} scrapes skipped and {taken} taken in the last minutes",
            "time the metrics pages with curl; raise --refresh-metrics-interval if they cannot be faster",
        )
    if (foreign := recent.get("scrapes_foreign_total", 0)) and foreign > FOREIGN_SHARE * taken:
        yield Finding(
            "other-senders",
            WARNING,
            "Servers have more requests than this picker has sent",
            f"{foreign} of {taken} metrics pages in the last minutes",
            "send all requests of the pool through the picker, and give its replicas a store (--replica-store): between two pages it knows "
            "only what it has sent. Batches of prompts in one request count as several",
        )


def _gateway(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    recent = values.get("recent", {})
    given_up, accepted = recent.get("handshakes_given_up_total", 0), recent.get("connections_total", 0)
    if given_up >= GIVEN_UP_MIN and given_up > GIVEN_UP_SHARE * (given_up + accepted):
        yield Finding(
            "handshakes-given-up",
            ERROR,
            "Gateways give up connecting to the picker, and answer requests with 503",
            f"in the last minutes, {given_up} TLS connections were closed before their handshake was complete, {accepted} were accepted",
            "give the picker more CPU (`epp size`), and its cluster in the gateway connect_timeout: 10s (deploy/envoy.yaml)",
        )
    if buffered := recent.get("streams_not_duplex_total", 0):
        yield Finding(
            "not-full-duplex",
            WARNING,
            "A gateway does not stream bodies in full duplex",
            f"{buffered} requests in the last minutes: the gateway holds whole bodies, so long prompts and first tokens come later",
            "set request_body_mode and response_body_mode of its ext_proc filter to FULL_DUPLEX_STREAMED (deploy/envoy.yaml)",
        )
    if hidden := recent.get("subset_empty_total", 0):
        yield Finding(
            "subset",
            ERROR,
            "A subset filter of the gateway hides all endpoints",
            f"{hidden} requests in the last minutes had a subset without an endpoint of this pool",
            "compare the addresses in the metadata x-gateway-destination-endpoint-subset with `epp top`; to ignore subsets, start with "
            "--disable-endpoint-subset-filter",
        )
    if broken := recent.get("violations_total", 0):
        yield Finding(
            "protocol",
            WARNING,
            "A gateway breaks the ext_proc protocol",
            f"{broken} streams in the last minutes",
            "look for `protocol` in the picker's log; compare the filter with deploy/envoy.yaml",
        )


def _faults(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    recent = values.get("recent", {})
    if faults := recent.get("faults_total", 0):
        yield Finding(
            "faults",
            ERROR,
            "Requests fail inside the picker",
            f"{faults} faults in the last minutes",
            "the log has the exception; `epp explain --last` names the plugin",
        )
    if objectives := recent.get("objectives_unknown_total", 0):
        yield Finding(
            "objectives",
            WARNING,
            "Requests name objectives that do not exist",
            f"{objectives} requests in the last minutes; their priority is 0",
            "`kubectl get inferenceobjectives` lists those that exist; compare the header x-llm-d-inference-objective",
        )


def _host(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    host, memory = values.get("host", {}), values.get("shared_memory", {})
    workers = host.get("workers", 0)
    cpus = host.get("cpus", workers)
    if workers > max(WORKERS_MIN, cpus):
        yield Finding(
            "cpu-limit",
            WARNING,
            "There are more workers than CPUs",
            f"{workers} workers, {cpus} CPUs (by affinity and CPU limit)",
            f"start with --workers {max(WORKERS_MIN, cpus)}, or raise the CPU limit: `epp size` says what a load needs",
        )
    free, size = memory.get("free_bytes", 0), memory.get("bytes", 0)
    if size and free < max(FREE_BYTES_MIN, size * FREE_SHARE_MIN):
        yield Finding(
            "shared-memory",
            WARNING,
            "Shared memory is nearly full, so the picker may not start again",
            f"/dev/shm: {free >> 20} MiB of {size >> 20} MiB free",
            "`ls -l /dev/shm` shows who uses it; in Kubernetes, raise sizeLimit of the volume with medium Memory",
        )


def _access(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for port, until in values.get("certificates", {}).items():
        left = until - values["at"]
        if left <= 0 or port in values.get("certificates_soon", ()):
            yield Finding(
                "certificate",
                ERROR if left <= 0 else WARNING,
                f"The certificate of the {port} port {'has expired' if left <= 0 else 'expires soon'}",
                f"{abs(left) / DAY_S:.1f} days {'ago' if left <= 0 else 'left'}",
                "renew tls.crt and tls.key in its folder; with --enable-cert-reload, the picker takes them over at once",
            )
    for resource, why in values.get("access_refused", {}).items():
        if why.startswith(NOT_ALLOWED):
            yield Finding(
                "rbac",
                ERROR,
                f"The API server does not let the picker follow {resource}",
                why,
                "add the rule that the evidence names, or install the chart's RBAC; `epp doctor` lists all verbs that are missing",
            )
        else:
            yield Finding(
                "kubernetes-api",
                ERROR,
                f"The picker cannot follow {resource}: the API server's answer is of no use",
                why,
                "look at the API server and at what answers in its place, such as a proxy; what is known stays until then",
            )


def _doctor(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for found in values.get("doctor", {}).get("findings", ()):
        yield Finding(**found)


def _reload(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    configuration = values.get("configuration")
    if configuration is None:
        return
    if configuration["last_reload_failed"]:
        yield Finding(
            "reload",
            ERROR,
            "The last reload was refused; the configuration before it stays in force",
            configuration["last_reload_failed"],
            "correct the file: `epp config check FILE` prints the same findings; then `epp config reload`",
        )
    if configuration["workers"] != values["workers_serving"]:
        yield Finding(
            "generations",
            WARNING,
            "Not all workers use the configuration in force",
            f"{configuration['workers']} of {values['workers_serving']} workers use generation {configuration['generation']}",
            "wait until the others have taken it over; the log says if one refuses",
        )


def _warnings(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for warning in values.get("settings", {}).get("warnings", ()):
        if not any(f"[{rule}]" in warning for rule in ADVICE):
            fix = "change what it names, then `epp config reload`; `epp config check FILE` shows whether it is gone"
            yield Finding("configuration", WARNING, "The configuration has a warning", warning, fix)


def _out_of_service(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    plugin = values.get("out_of_service")
    if plugin is not None:
        yield Finding(
            "out-of-service",
            ERROR,
            "It is out of service, because its plugins have ended two workers",
            f"{f'the plugin {plugin} ran' if plugin else 'its requests were decided'} when they ended; its requests get 503",
            "the log has the ends of the workers; correct the plugin, or take it out of the configuration; then `epp config reload`",
        )


def _left_out(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    for plugin, workers in values.get("left_out", {}).items():
        yield Finding(
            "left-out",
            ERROR,
            f"The plugin {plugin} is left out, because it failed too often",
            f"in {workers} workers",
            "the log has its exception; correct the plugin, then `epp config reload`",
        )


def _full(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    saturation = values.get("flow_control", {}).get("saturation", {}).get("effective", 0.0)
    waiting = sum(band["requests"] for band in values.get("bands") or ())
    if saturation >= 1.0 and waiting:
        yield Finding(
            "full",
            WARNING,
            "The pool is full, so requests wait",
            f"saturation {saturation:g}, {waiting} requests wait",
            "add model servers; until then, priorities decide who waits (docs/flow-control.md)",
        )
    flows = values.get("flows", ())
    if waiting >= HOT_WAITING and flows and len(flows) > 1 and flows[0]["requests"] > HOT_SHARE * waiting:
        yield Finding(
            "hot-flow",
            WARNING,
            "One flow has most of the waiting requests",
            f"{flows[0]['fairness_id']} has {flows[0]['requests']} of {waiting}",
            "fairness protects the others; give the flow a lower priority, or limit it at the gateway",
        )


def _lost(values: Values, _endpoints: Mapping[str, Values]) -> Iterator[Finding]:
    if values["bus_drops"]:
        yield Finding(
            "bus-drops",
            WARNING,
            "The prefix index has missed updates",
            f"{values['bus_drops']} updates dropped, because the supervisor was late",
            "give the picker more CPU: `epp size`",
        )
    if values.get("replica_store_connected") is False:
        others = values.get("others")
        heard = f"; last heard of other replicas {others['age_s']} s ago" if others is not None else ""
        yield Finding(
            "replicas",
            ERROR,
            "Other replicas are ignored, because the store cannot be used",
            f"llm_d_epp_replica_store_connected is 0{heard}",
            "look at the replica store; the log says why it cannot be used",
        )


OF_POOL: Final = frozenset(
    (_no_endpoints, _unusable, _out_of_service, _left_out, _full, _unread_pages, kv_events, block_sizes, caching_off, _warnings)
)
RULES: Final[tuple[Callable[[Values, Mapping[str, Values]], Iterator[Finding]], ...]] = (
    _no_endpoints,
    unserved,
    _supervisor,
    _workers,
    _unusable,
    _gateway,
    _faults,
    _access,
    _reload,
    _out_of_service,
    _left_out,
    _lost,
    _full,
    _unread_pages,
    without_tokens,
    kv_events,
    block_sizes,
    caching_off,
    salts_ignored,
    _implausible,
    _host,
    _warnings,
    _doctor,
)
