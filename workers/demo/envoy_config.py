"""The Envoy bootstrap that a gateway with this endpoint picker needs, as plain data.

`bootstrap` is used by `epp demo` and by the end-to-end tests; `deploy/envoy.yaml` says the same with comments, and a test
holds both equal. The decisions in it:

- every body mode is FULL_DUPLEX_STREAMED and every header and trailer mode SEND: the picker sees the whole request
  before it answers and follows the response as it streams by. Nothing is buffered in Envoy;
- the picker's answer is the header `x-gateway-destination-endpoint`, and an ORIGINAL_DST cluster connects to whatever
  address it names. A client's own header of that name, and those that gateway and picker tell each other as metadata, are
  removed by an early header mutation, before any filter and any route, and whether there is a picker or not.
  `request_headers_to_remove` of a route acts in the router, after the picker, and would remove its answer;
- `message_timeout` bounds how long Envoy waits for an answer to one message, and a request that queues in the picker's flow
  control is such a wait: it has to be longer than the longest time in the queue (60 s unless configured; ten minutes
  leave room for a tail of several). A picker
  that is gone is noticed at once by the connection, not by this time-out;
- circuit breakers far above Envoy's 1,024: a stream to the picker lives as long as its request, so the default answers
  request 1,025 with an error;
- few streams per connection to the picker: its workers are processes that share connections, not streams. The picker asks for
  that itself, but Envoy learns it only after it has put all that waited onto a new connection; told here, it opens
  several connections at once instead;
- no route time-out and no stream idle time-out: a long prompt may take minutes to its first token;
- no picker, no guess: `failure_mode_allow` is false and the client gets 503;
- the picker's filter is on by the routes, not for all: what Envoy refuses by itself (headers too long, HTTP/1.0, garbage) has no route.
  With the filter Envoy would send its refusal to the picker first and close the connection without waiting, so that the client
  never learns why;
- an ORIGINAL_DST cluster connects to one address. A picker that names several in order (`maxNumOfEndpoints` of its pickers) needs
  a cluster that knows the servers (`listed`; `deploy/envoy-retry.yaml`): its override_host policy takes the first of them,
  retries take the next ones, and the metadata `envoy.lb` tell the picker who served in the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

DESTINATION_HEADER = "x-gateway-destination-endpoint"
STRIPPED_HEADERS = (DESTINATION_HEADER, *(f"{DESTINATION_HEADER}-{what}" for what in ("subset", "served", "scores")))
METADATA_NAMESPACE = "envoy.lb"
RETRIES = 3  # as many as there may be further endpoints in the picker's list
BODY_BYTES_MAX = 32 << 20  # the longest that the picker takes; unless told so, Envoy sends none over 1 MiB again
PICKER_CLUSTER = PICKER_FILTER = "endpoint-picker"
SERVERS_CLUSTER = "model-servers"
ROUND_ROBIN_CLUSTER = "model-servers-round-robin"
CONCURRENT_MAX = 40_000
MESSAGE_TIMEOUT_S = 600
STREAMS_PER_CONNECTION = 16
# By default one client that sends its body byte by byte (10,000 frames), or some that leave at once (1,000 resets), end the connection
# to the picker, and with it everybody's requests.
FRAMES_AHEAD_MAX = 1_000_000
RESETS_AHEAD_MAX = 100_000
CONNECT_TIMEOUT_S = 1
KEEP_ALIVE_S = 4  # uvicorn, and so vLLM, closes an idle connection after 5 s: be first
_TYPES = "type.googleapis.com/envoy."

Address = tuple[str, int]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PickerTls:
    """TLS to the picker. Without `trusted_ca` its certificate is not verified, as with a self-signed one."""

    trusted_ca: str | None = None
    server_name: str | None = None


def bootstrap(
    *,
    listen: Address = ("0.0.0.0", 8080),
    picker: Address = ("127.0.0.1", 9002),
    admin: Address = ("127.0.0.1", 9901),
    tls: PickerTls | None = None,
    round_robin: tuple[Address, Sequence[Address]] | None = None,
    listed: Sequence[Address] = (),
) -> Json:
    """The whole bootstrap. `round_robin` adds a second listener that spreads over fixed servers without a picker. `listed` are all
    model servers, for a gateway that tries the picker's choices one after the other.
    """
    listeners = [_listener("gateway", listen, SERVERS_CLUSTER, picked=True, retries=bool(listed))]
    clusters = [_picker_cluster(picker, tls), _listed_cluster(listed) if listed else _servers_cluster()]
    if round_robin is not None:
        at, servers = round_robin
        listeners.append(_listener("round-robin", at, ROUND_ROBIN_CLUSTER, picked=False))
        clusters.append(_round_robin_cluster(servers))
    return {
        "admin": {"address": _socket(admin)},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def to_yaml(config: Json) -> str:
    """What Envoy reads."""
    return yaml.safe_dump(config, sort_keys=False)


def _socket(address: Address) -> Json:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}


def _typed(kind: str, **fields: Any) -> Json:
    return {"@type": _TYPES + kind, **fields}


def _listener(name: str, at: Address, cluster: str, *, picked: bool, retries: bool = False) -> Json:
    filters = [_picker_filter(told=retries)] if picked else []
    route: Json = {"cluster": cluster, "timeout": "0s"}
    if retries:
        route["retry_policy"] = {
            "retry_on": "connect-failure,reset,retriable-status-codes",
            "retriable_status_codes": [503],
            "num_retries": RETRIES,
        }
    router = {"name": "router", "typed_config": _typed("extensions.filters.http.router.v3.Router")}
    entry: Json = {"match": {"prefix": "/"}, "route": route}
    if retries:
        entry["request_body_buffer_limit"] = BODY_BYTES_MAX
    host: Json = {"name": name, "domains": ["*"], "routes": [entry]}
    if picked:
        host["typed_per_filter_config"] = {PICKER_FILTER: _typed("config.route.v3.FilterConfig", config={})}
    manager = _typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        codec_type="AUTO",
        stream_idle_timeout="0s",
        request_headers_timeout="10s",
        early_header_mutation_extensions=[_strip_destination()],
        route_config={"name": name, "virtual_hosts": [host]},
        http_filters=[*filters, router],
    )
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": name, "address": _socket(at), "filter_chains": [chain]}


def _strip_destination() -> Json:
    mutation = _typed(
        "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=[{"remove": name} for name in STRIPPED_HEADERS],
    )
    return {"name": "only-the-picker-decides", "typed_config": mutation}


def _picker_filter(*, told: bool) -> Json:
    processor = _typed(
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": PICKER_CLUSTER}},
        failure_mode_allow=False,
        status_on_error={"code": "ServiceUnavailable"},
        message_timeout=f"{MESSAGE_TIMEOUT_S}s",
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
    )
    if told:
        processor["metadata_options"] = {"forwarding_namespaces": {"untyped": [METADATA_NAMESPACE]}}
    return {"name": PICKER_FILTER, "disabled": True, "typed_config": processor}


def _breakers() -> Json:
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), CONCURRENT_MAX)
    return {"thresholds": [{"priority": "DEFAULT", **limits}]}


def _protocol(http: Json, idle_s: int | None = None) -> Json:
    options = _typed("extensions.upstreams.http.v3.HttpProtocolOptions", explicit_http_config=http)
    if idle_s is not None:
        options["common_http_protocol_options"] = {"idle_timeout": f"{idle_s}s"}
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options}


def _static(name: str, addresses: Sequence[Address]) -> Json:
    hosts = [{"endpoint": {"address": _socket(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _picker_cluster(picker: Address, tls: PickerTls | None) -> Json:
    cluster: Json = {
        "name": PICKER_CLUSTER,
        "type": "STATIC",
        "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
        "circuit_breakers": _breakers(),
        "typed_extension_protocol_options": _protocol(
            {
                "http2_protocol_options": {
                    "max_concurrent_streams": STREAMS_PER_CONNECTION,
                    "max_outbound_frames": FRAMES_AHEAD_MAX,
                    "max_outbound_control_frames": RESETS_AHEAD_MAX,
                }
            }
        ),
        "load_assignment": _static(PICKER_CLUSTER, [picker]),
    }
    if tls is not None:
        cluster["transport_socket"] = {"name": "tls", "typed_config": _tls(tls)}
    return cluster


def _tls(tls: PickerTls) -> Json:
    common: Json = {"alpn_protocols": ["h2"]}
    if tls.trusted_ca is not None:
        common["validation_context"] = {"trusted_ca": {"filename": tls.trusted_ca}}
    context = _typed("extensions.transport_sockets.tls.v3.UpstreamTlsContext", common_tls_context=common)
    if tls.server_name is not None:
        context["sni"] = tls.server_name
    return context


def _servers_cluster() -> Json:
    return {
        "name": SERVERS_CLUSTER,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION_HEADER},
        "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
        "circuit_breakers": _breakers(),
        "typed_extension_protocol_options": _protocol({"http_protocol_options": {}}, KEEP_ALIVE_S),
    }


def _listed_cluster(addresses: Sequence[Address]) -> Json:
    spread = _typed("extensions.load_balancing_policies.round_robin.v3.RoundRobin")
    override = _typed(
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION_HEADER}],
        selected_host_key={"key": METADATA_NAMESPACE, "path": [{"key": f"{DESTINATION_HEADER}-served"}]},
        fallback_policy=_policy("envoy.load_balancing_policies.round_robin", spread),
    )
    return {
        "name": SERVERS_CLUSTER,
        "type": "STATIC",
        "load_balancing_policy": _policy("envoy.load_balancing_policies.override_host", override),
        "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
        "circuit_breakers": _breakers(),
        "typed_extension_protocol_options": _protocol({"http_protocol_options": {}}, KEEP_ALIVE_S),
        "load_assignment": _static(SERVERS_CLUSTER, addresses),
    }


def _policy(name: str, config: Json) -> Json:
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": config}}]}


def _round_robin_cluster(servers: Sequence[Address]) -> Json:
    return {
        "name": ROUND_ROBIN_CLUSTER,
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
        "circuit_breakers": _breakers(),
        "typed_extension_protocol_options": _protocol({"http_protocol_options": {}}, KEEP_ALIVE_S),
        "load_assignment": _static(ROUND_ROBIN_CLUSTER, servers),
    }
