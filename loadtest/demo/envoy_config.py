"""Makes the Envoy bootstrap of a gateway with this endpoint picker, as plain data.

`epp demo` and the end-to-end tests use `bootstrap`. `deploy/envoy.yaml` has the same content with comments, and a test compares both.
Why the bootstrap is as it is:

- Every body mode is FULL_DUPLEX_STREAMED, and every header and trailer mode is SEND: the picker sees the whole request before it
  answers, and follows the response while it streams. Envoy buffers nothing.
- The picker's answer is the header `x-gateway-destination-endpoint`, and an ORIGINAL_DST cluster connects to the address in it. An
  early header mutation removes this header and all other control headers (`epp.config.control_headers`) from client requests. It runs
  before any filter and any route, with or without a picker. A filter before the picker's may set them again, from what it knows of the
  client. `request_headers_to_remove` of a route would run in the router, after the picker, and remove the picker's answer.
- `message_timeout` limits how long Envoy waits for the answer to one message, including the time in the picker's flow control. So it
  must be longer than the longest time in the queue (60 s by default; ten minutes leave room for several such times). Envoy detects a
  dead picker at once by the connection, not by this time-out.
- Circuit breakers are far above Envoy's default of 1,024: a stream to the picker lives as long as its request, so with the default,
  request 1,025 would get an error.
- There are few streams per connection to the picker, because its workers are processes that share connections, not streams. The picker
  also announces this limit, but Envoy reads it only after it has put all waiting streams onto a new connection. With the limit in its
  configuration, Envoy opens several connections at once.
- There is no route time-out and no stream idle time-out: a long prompt may take minutes until its first token.
- Without a picker, clients get 503: `failure_mode_allow` is false.
- Routes turn on the picker's filter; it is off by default. Requests that Envoy refuses itself (headers too long, HTTP/1.0, garbage)
  have no route. With the filter on, Envoy would send its refusal to the picker first and close the connection without waiting, so the
  client would never get the reason.
- An ORIGINAL_DST cluster connects to one address. If the picker names several in order (`maxNumOfEndpoints` of its pickers), Envoy
  needs a cluster that knows the servers (`listed`; `deploy/envoy-retry.yaml`). Its override_host policy uses the first address,
  retries use the next ones, and the metadata `envoy.lb` tells the picker which server answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from epp.config.control_headers import CONTROL_HEADERS, TARGET_HEADERS

SERVER_HEADER = "x-served-by"  # the address of the model server that answered
DESTINATION_HEADER = "x-gateway-destination-endpoint"
METADATA_NAMESPACE = "envoy.lb"
RETRIES = 3  # the number of endpoints that the picker's list can have after the first one
BODY_BYTES_MAX = 32 << 20  # the picker's limit; by default, Envoy does not retry a body over 1 MiB
PICKER_CLUSTER = PICKER_FILTER = "endpoint-picker"
SERVERS_CLUSTER = "model-servers"
ROUND_ROBIN_CLUSTER = "model-servers-round-robin"
CONCURRENT_MAX = 40_000
MESSAGE_TIMEOUT_S = 600
STREAMS_PER_CONNECTION = 16
# With Envoy's defaults, one client that sends its body byte by byte (10,000 frames), or many clients that leave at once (1,000 resets),
# would end the connection to the picker and all requests on it.
FRAMES_AHEAD_MAX = 1_000_000
RESETS_AHEAD_MAX = 100_000
CONNECT_TIMEOUT_S = 1
PICKER_CONNECT_S = 10  # with the TLS handshake, for which a picker that is short of CPU needs longer
KEEP_ALIVE_S = 4  # uvicorn, and so vLLM, closes an idle connection after 5 s, and Envoy must close it before that
_TYPES = "type.googleapis.com/envoy."

Address = tuple[str, int]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PickerTls:
    """The settings of TLS to the picker. Without `trusted_ca`, Envoy does not verify the picker's certificate, which may be self-signed."""

    trusted_ca: str | None = None
    server_name: str | None = None


def bootstrap(
    *,
    listen: Address = ("0.0.0.0", 8080),
    picker: Address = ("127.0.0.1", 9002),
    replicas: Sequence[Address] = (),
    admin: Address = ("127.0.0.1", 9901),
    tls: PickerTls | None = None,
    round_robin: tuple[Address, Sequence[Address]] | None = None,
    listed: Sequence[Address] = (),
    names_servers: bool = False,
    edge: bool = True,
) -> Json:
    """Returns the whole bootstrap.

    `replicas`: further replicas of the picker; each request goes to a random one.
    `round_robin`: a second listener that sends requests to these servers without a picker. `listed`: all model servers, for a gateway
    that tries the picker's choices one by one. `names_servers`: whether each answer of the gateway gets the header `SERVER_HEADER`.
    `edge`: whether requests come from outside. If not, requests may have control headers, but none that chooses a server.
    """
    listeners = [_listener("gateway", listen, SERVERS_CLUSTER, picked=True, retries=bool(listed), edge=edge)]
    if names_servers:
        (chain,) = listeners[0]["filter_chains"]
        (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        host["response_headers_to_add"] = [{"header": {"key": SERVER_HEADER, "value": "%UPSTREAM_HOST%"}}]
    clusters = [_picker_cluster([picker, *replicas], tls), _listed_cluster(listed) if listed else _servers_cluster()]
    if round_robin is not None:
        at, servers = round_robin
        listeners.append(_listener("round-robin", at, ROUND_ROBIN_CLUSTER, picked=False))
        clusters.append(_round_robin_cluster(servers))
    return {"admin": {"address": _socket(admin)}, "static_resources": {"listeners": listeners, "clusters": clusters}}


def to_yaml(config: Json) -> str:
    """Encodes the bootstrap as YAML for Envoy."""
    return yaml.safe_dump(config, sort_keys=False)


def _socket(address: Address) -> Json:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}


def _typed(kind: str, **fields: Any) -> Json:
    return {"@type": _TYPES + kind, **fields}


def _listener(name: str, at: Address, cluster: str, *, picked: bool, retries: bool = False, edge: bool = True) -> Json:
    filters = [_picker_filter(metadata=retries)] if picked else []
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
        always_set_request_id_in_response=True,
        stream_idle_timeout="0s",
        request_headers_timeout="10s",
        request_timeout="660s",
        early_header_mutation_extensions=[_removed(CONTROL_HEADERS if edge else TARGET_HEADERS)],
        route_config={"name": name, "virtual_hosts": [host]},
        http_filters=[*filters, router],
    )
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": name, "address": _socket(at), "filter_chains": [chain]}


def _removed(names: Sequence[str]) -> Json:
    mutation = _typed(
        "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation", mutations=[{"remove": name} for name in names]
    )
    return {"name": "no-control-headers-from-outside", "typed_config": mutation}


def _picker_filter(*, metadata: bool) -> Json:
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
    if metadata:
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


def _picker_cluster(pickers: Sequence[Address], tls: PickerTls | None) -> Json:
    cluster: Json = {
        "name": PICKER_CLUSTER,
        "type": "STATIC",
        "connect_timeout": f"{PICKER_CONNECT_S}s",
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
        "load_assignment": _static(PICKER_CLUSTER, pickers),
    }
    if len(pickers) > 1:
        cluster["lb_policy"] = "RANDOM"
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
