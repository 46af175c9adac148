"""Checks the configuration of Envoy: its bootstrap file, or what its admin port shows at /config_dump. Does no I/O.

A filter that calls an external processor names a cluster. Filter and cluster together decide whether requests reach the picker whole and in
time, and whether they end other requests. The names of fields are those of Envoy's API, version 3.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from epp.config.control_headers import FAIRNESS, FIX, exposed
from epp.quantities import parse_duration
from epp.request.client_headers import GATEWAY, GROUPS
from workers.shared.doctor_report import ERROR, WARNING, Finding

MANAGER: Final = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
FILTER: Final = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
DUPLEX: Final = "FULL_DUPLEX_STREAMED"
BUFFERED: Final = ("BUFFERED", "BUFFERED_PARTIAL")
FRAMES: Final = {"max_outbound_frames": (10_000, 1_000_000), "max_outbound_control_frames": (1_000, 100_000)}
REQUESTS_DEFAULT: Final = 1024
REQUESTS_WANTED: Final = 40_000
MESSAGE_TIMEOUT_DEFAULT: Final = "0.2s"
CONNECT_DEFAULT: Final = "5s"
CONNECT_S_MIN: Final = 5.0
DEPTH_MAX: Final = 64
EXAMPLE: Final = "deploy/envoy.yaml has all of it"
LET_THROUGH: Final = f"remove them in early_header_mutation_extensions of the HTTP connection manager, before any filter; {EXAMPLE}"

Json = Any


class Peer(NamedTuple):
    """The picker's side of the connection. `tls`: whether the ext_proc port uses TLS. `waits_s`: the longest time in the picker's queue.

    `ports`: the ext_proc ports; empty if not known.
    """

    tls: bool
    waits_s: float
    ports: Collection[int] = ()


class TlsNames(NamedTuple):
    """The names that a gateway's TLS expects in the picker's certificate. `verified`: whether the gateway trusts certain CAs only."""

    names: Sequence[str]
    verified: bool


def gateway_findings(config: Json, peer: Peer) -> list[Finding]:
    """Returns the findings about the filters that call the picker: the filters with a cluster that has one of the picker's ports, or all
    filters if no cluster has such a port.
    """
    every = list(_filters(config))
    filters = [each for each in every if _reaches(config, each, peer.ports)] or every
    if not filters:
        why = "the configuration has no filter envoy.filters.http.ext_proc"
        fix = "add the filter to the route: deploy/envoy.yaml; a Gateway needs a route to the InferencePool"
        return [Finding("gateway-filter", ERROR, "The gateway does not call a picker", why, fix)]
    found: list[Finding] = []
    for processor in filters:
        name = _cluster_name(processor)
        clusters = [each for each in _clusters(config) if each.get("name") == name]
        found += _modes(processor, name)
        found += _times(processor, name, peer)
        if not clusters:
            why = f"the filter names the cluster '{name}', which the configuration does not have"
            found.append(Finding("gateway-cluster", ERROR, "The gateway cannot reach the picker", why, EXAMPLE))
        for cluster in clusters[:1]:
            found += _limits(cluster)
            found += _tls(cluster, peer)
    return list(dict.fromkeys(found))


def calls(config: Json, ports: Collection[int]) -> bool:
    """Returns whether a filter calls the picker with these ext_proc ports."""
    return any(_reaches(config, each, ports) for each in _filters(config))


def picker_clusters(config: Json, ports: Collection[int]) -> list[str]:
    """Returns the names of the clusters by which filters call the picker with these ports, or of all clusters that filters call if no
    cluster has such a port.
    """
    every = list(_filters(config))
    filters = [each for each in every if _reaches(config, each, ports)] or every
    return list(dict.fromkeys(map(_cluster_name, filters)))


def headers_from_outside(config: Json, ports: Collection[int], names: Collection[str]) -> list[str] | None:
    """Returns the headers among `names` that a request from outside can bring to the picker with these ports.

    Returns None if no HTTP listener of the configuration calls the picker. Ignores filters that remove headers later than
    `early_header_mutation_extensions`.
    """
    managers = [each for each in _walk(config, 0) if str(each.get("@type", "")).endswith(MANAGER)]
    every = [each for each in managers if any(_filters(each))]
    calling = [each for each in every if any(_reaches(config, processor, ports) for processor in _filters(each))] or every
    if not calling:
        return None
    removed = [{name for name in names if _removes(manager, name)} for manager in calling]
    return [name for name in names if any(name not in each for each in removed)]


def client_header_findings(flag: str, config: Json, ports: Collection[int], *, tenants: bool = False) -> list[Finding]:
    """Returns the finding about headers that the picker trusts and clients can set, if there are such headers.

    `flag`: the value of the picker's --trust-client-headers. `config`: the gateway's configuration, which takes precedence over the flag;
    None if not known. `ports`: the picker's ext_proc ports. `tenants`: whether the picker has tenants, so that no client names its fairness
    id.
    """
    words = flag.split(",")
    trusted = [group for group in GROUPS if group in words and not (tenants and group == FAIRNESS)]
    names = [name for group in trusted for name in GROUPS[group]]
    outside = headers_from_outside(config, ports, names) if config is not None else None
    if outside is None:
        return [] if GATEWAY in words else _open_headers(trusted, f"--trust-client-headers is {flag}", FIX)
    open_groups = [group for group in trusted if set(GROUPS[group]) & set(outside)]
    return _open_headers(open_groups, f"the gateway lets through: {', '.join(outside)}", LET_THROUGH)


def tls_names(config: Json) -> TlsNames:
    """Returns the names by which the gateway verifies the certificate of the picker."""
    names: list[str] = []
    verified = False
    for processor in _filters(config):
        for cluster in _clusters(config):
            if cluster.get("name") != _cluster_name(processor):
                continue
            context = _mapping(_mapping(cluster.get("transport_socket")).get("typed_config"))
            common = _mapping(context.get("common_tls_context"))
            validation = _mapping(common.get("validation_context"))
            validation = validation or _mapping(_mapping(common.get("combined_validation_context")).get("default_validation_context"))
            verified |= "trusted_ca" in validation
            listed = _list(validation.get("match_typed_subject_alt_names"))
            matches = [_mapping(each.get("matcher", each)) for each in map(_mapping, listed)]
            names += [str(match["exact"]) for match in matches if "exact" in match]
    return TlsNames(tuple(dict.fromkeys(names)), verified)


def _modes(processor: Mapping[str, Json], name: str) -> Iterator[Finding]:
    mode = _mapping(processor.get("processing_mode"))
    for field in ("request_body_mode", "response_body_mode"):
        value = mode.get(field, "NONE")
        if value != DUPLEX:
            works = value in BUFFERED or field == "response_body_mode"
            yield Finding(
                "gateway-full-duplex",
                WARNING if works else ERROR,
                f"The gateway's ext_proc filter has {field} {value}",
                f"filter with cluster '{name}': processing_mode.{field} is {value}"
                + ("" if works else ": the picker never sees a whole request"),
                f"set processing_mode: {{{field}: {DUPLEX}}}; {EXAMPLE}",
            )
    for field in ("request_trailer_mode", "response_trailer_mode"):
        body = field.replace("trailer", "body")
        if mode.get(body) == DUPLEX and mode.get(field) != "SEND":
            yield Finding(
                "gateway-trailers",
                ERROR,
                f"The gateway's ext_proc filter does not send trailers ({field})",
                f"filter with cluster '{name}': {body} is {DUPLEX}, and Envoy then requires {field} SEND",
                f"set processing_mode: {{{field}: SEND}}",
            )
    if processor.get("failure_mode_allow"):
        yield Finding(
            "gateway-failure-mode",
            WARNING,
            "The gateway passes requests on without the picker",
            f"filter with cluster '{name}': failure_mode_allow is true, so a request without a decision goes to no certain server",
            "set failure_mode_allow: false, unless its route works without the header of the picker",
        )


def _times(processor: Mapping[str, Json], name: str, peer: Peer) -> Iterator[Finding]:
    text = str(processor.get("message_timeout", MESSAGE_TIMEOUT_DEFAULT))
    try:
        timeout_s = parse_duration(text)
    except ValueError:
        return
    if timeout_s < peer.waits_s:
        yield Finding(
            "gateway-timeout",
            ERROR if timeout_s < 1 else WARNING,
            "The gateway gives up requests that wait in the picker",
            f"filter with cluster '{name}': message_timeout is {text}, and a request may wait {peer.waits_s:g} s in the picker's queue",
            f"set message_timeout: {max(600, int(2 * peer.waits_s))}s",
        )


def _limits(cluster: Mapping[str, Json]) -> Iterator[Finding]:
    name = cluster["name"]
    connect = str(cluster.get("connect_timeout", CONNECT_DEFAULT))
    with suppress(ValueError):
        if parse_duration(connect) < CONNECT_S_MIN:
            yield Finding(
                "gateway-connect-timeout",
                WARNING,
                "The gateway gives up connecting to the picker early",
                f"cluster '{name}': connect_timeout is {connect}, and includes the TLS handshake; each request then fails with 503",
                f"set connect_timeout: 10s; {EXAMPLE}",
            )
    http2 = _http2(cluster)
    if http2 is None:
        yield Finding(
            "gateway-http2",
            ERROR,
            "The gateway does not speak HTTP/2 to the picker",
            f"cluster '{name}' has no http2_protocol_options",
            f"add them to typed_extension_protocol_options; {EXAMPLE}",
        )
        return
    for field, (default, wanted) in FRAMES.items():
        value = _number(http2.get(field), default)
        if value < wanted:
            yield Finding(
                "gateway-frames",
                WARNING,
                f"One slow client can end the requests of others ({field})",
                f"cluster '{name}': {field} is {value}; with so many frames ahead, Envoy closes the connection and all its requests",
                f"set http2_protocol_options: {{{field}: {wanted}}}; {EXAMPLE}",
            )
    thresholds = _list(_mapping(cluster.get("circuit_breakers")).get("thresholds")) or [{}]
    most = min(_number(_mapping(each).get("max_requests"), REQUESTS_DEFAULT) for each in thresholds)
    if most <= REQUESTS_DEFAULT:
        yield Finding(
            "gateway-circuit-breaker",
            WARNING,
            f"The gateway allows only {most} requests at once",
            f"cluster '{name}': max_requests is {most}, and a stream to the picker lasts as long as its request",
            f"set circuit_breakers: {{thresholds: [{{max_requests: {REQUESTS_WANTED}, max_connections: {REQUESTS_WANTED}}}]}}",
        )


def _tls(cluster: Mapping[str, Json], peer: Peer) -> Iterator[Finding]:
    speaks = "transport_socket" in cluster
    if speaks == peer.tls:
        return
    how, other = ("TLS", "plaintext") if speaks else ("plaintext", "TLS")
    fix = "remove its transport_socket, or start the picker with --secure-serving" if speaks else "add a transport_socket"
    yield Finding(
        "gateway-tls",
        ERROR,
        f"The gateway speaks {how} and the picker {other}",
        f"cluster '{cluster['name']}' has {'a' if speaks else 'no'} transport_socket; the picker's port uses {other}",
        f"{fix}; {EXAMPLE}",
    )


def _open_headers(groups: Sequence[str], evidence: str, fix: str) -> list[Finding]:
    if not groups:
        return []
    title = "Clients can set headers that the picker trusts"
    lines = [evidence, *(f"a client can {power}" for power in exposed(groups))]
    return [Finding("client-headers", WARNING, title, "\n".join(lines), fix)]


def _removes(manager: Mapping[str, Json], name: str) -> bool:
    """Returns whether an HTTP connection manager removes a header before its first filter."""
    for mutation in _walk(manager.get("early_header_mutation_extensions", []), 0):
        if str(mutation.get("remove", "")).lower() == name:
            return True
        matcher = _mapping(_mapping(mutation.get("remove_on_match")).get("key_matcher"))
        if str(matcher.get("exact", "")).lower() == name or name.startswith(str(matcher.get("prefix", "")).lower() or "\0"):
            return True
    return False


def _http2(cluster: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """Returns the HTTP/2 options of a cluster, or None."""
    options = _mapping(_mapping(cluster.get("typed_extension_protocol_options")).get(HTTP_OPTIONS))
    for kind in ("explicit_http_config", "use_downstream_protocol_config", "auto_config"):
        if kind in options and "http2_protocol_options" in _mapping(options[kind]):
            return _mapping(options[kind]["http2_protocol_options"])
    return _mapping(cluster["http2_protocol_options"]) if "http2_protocol_options" in cluster else None


def _filters(config: Json) -> Iterator[Mapping[str, Json]]:
    return (each for each in _walk(config, 0) if str(each.get("@type", "")).endswith(FILTER))


def _clusters(config: Json) -> Iterator[Mapping[str, Json]]:
    """Yields each cluster of a dump or a file: a mapping with a name and with a time-out, a type or endpoints."""
    marks = ("connect_timeout", "load_assignment", "type", "typed_extension_protocol_options")
    return (each for each in _walk(config, 0) if "name" in each and any(mark in each for mark in marks))


def _reaches(config: Json, processor: Mapping[str, Json], ports: Collection[int]) -> bool:
    """Returns whether the cluster of a filter has an endpoint with one of these ports."""
    clusters = [each for each in _clusters(config) if each.get("name") == _cluster_name(processor)]
    return any(each.get("port_value") in ports for cluster in clusters for each in _walk(cluster, 0))


def _cluster_name(processor: Mapping[str, Json]) -> str:
    return str(_mapping(_mapping(processor.get("grpc_service")).get("envoy_grpc")).get("cluster_name", ""))


def _walk(value: Json, depth: int) -> Iterator[Mapping[str, Json]]:
    """Yields all mappings in a document of at most DEPTH_MAX levels."""
    if depth > DEPTH_MAX:
        return
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _walk(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            yield from _walk(each, depth + 1)


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _list(value: Json) -> Sequence[Json]:
    return value if isinstance(value, list) else ()


def _number(value: Json, default: int) -> int:
    """Reads a number of Envoy's JSON, which may be text."""
    try:
        return default if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return default
