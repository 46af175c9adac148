"""The texts of the ConfigMaps: files of this folder with a few places to fill in.

    default-plugins.yaml  @SCHEME@ @PATH@ @INSECURE@ @ENGINE@ @PARSERS@
    envoy.yaml            @PORT@ @METRICS_PORT@ @PICKER_PORT@ @TRANSPORT_SOCKET@ @SERVERS_HTTP@

What is filled in is JSON, and so YAML. The chart has the same files and fills in the same.
"""

import json
from importlib import resources
from typing import Any, Final

from workers.manifests.settled import Settled

_TYPES: Final = "type.googleapis.com/envoy.extensions.transport_sockets."
PLAIN: Final = {"name": "plain", "typed_config": {"@type": f"{_TYPES}raw_buffer.v3.RawBuffer"}}
TLS: Final = {  # the picker's certificate is its own
    "name": "tls",
    "typed_config": {
        "@type": f"{_TYPES}tls.v3.UpstreamTlsContext",
        "common_tls_context": {"alpn_protocols": ["h2"]},
    },
}


def plugins(found: Settled) -> dict[str, str]:
    """The picker's configuration files, by name."""
    epp, servers = found.values.router.epp, found.values.router.model_servers
    if epp.plugins_custom_config:
        return epp.plugins_custom_config
    source = epp.metrics_data_source
    filled = _filled(
        "default-plugins.yaml",
        scheme=source.scheme,
        path=source.path,
        insecure=source.insecure_skip_verify,
        engine=servers.type,
        parsers=[{"pluginRef": name} for name in epp.parsers or _parsers(servers.type, servers.protocol)],
    )
    return {epp.plugins_config_file: filled}


def _parsers(kind: str, protocol: str) -> list[str]:
    """What a kind of model server needs instead of the default."""
    if kind == "triton":
        return ["passthrough-parser"]
    return ["vllmgrpc-parser"] if kind == "vllm" and protocol == "grpc" else []


def envoy(found: Settled) -> str:
    """The configuration of the Envoy in the picker's pod."""
    router = found.values.router
    return _filled(
        "envoy.yaml",
        port=router.proxy.port,
        metrics_port=router.proxy.metrics_port,
        picker_port=router.epp.ext_proc_port,
        transport_socket=TLS if found.secure else PLAIN,
        servers_http="http2_protocol_options" if router.model_servers.protocol == "grpc" else "http_protocol_options",
    )


def _filled(name: str, **places: Any) -> str:
    text = (resources.files("workers.manifests") / name).read_text()
    for place, value in places.items():
        text = text.replace(f"@{place.upper()}@", json.dumps(value, separators=(",", ":"), sort_keys=True))
    return text
