"""Finds the parts of a configuration that cannot work behind a certain gateway, for `epp config check --gateway`.

Facts about the gateways, from their code of November 2026:

- Envoy AI Gateway connects to the one address in the header (an ORIGINAL_DST cluster).
- agentgateway parses the header as one address (its issue 1444) and ignores dynamic metadata.
- NGINX Gateway Fabric reads only the target header of the answer, and passes the client's own headers and body on. The gateway half-closes
  the stream after the request, so the picker sees no response.
- Envoy accepts a list of addresses if the cluster in Envoy's own configuration lists the servers, by hand or through EDS, as in
  `deploy/envoy-retry.yaml`. Istio and GKE follow the endpoint picker protocol.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from epp.config.effective import EffectiveConfig
from epp.config.findings import WHOLE, ConfigWarning

SETS_HEADERS: Final = (
    "data-parallel-profile-handler",
    "disagg-headers-handler",
    "p2p-source-producer",
    "pd-profile-handler",
    "prefill-header-handler",
)
SENDS_METADATA: Final = ("request-attribute-reporter",)
COUNTS_IN_FLIGHT: Final = ("concurrency-detector",)


class Gateway(NamedTuple):
    """Says whether a gateway can use lists of endpoints, headers of plugins, and metadata, and whether it shows responses."""

    title: str
    lists: bool = True
    headers: bool = True
    responses: bool = True
    metadata: bool = True


GATEWAYS: Final[Mapping[str, Gateway]] = {
    "envoy": Gateway("Envoy"),
    "envoy-ai": Gateway("Envoy AI Gateway", lists=False),
    "agentgateway": Gateway("agentgateway", lists=False, metadata=False),
    "istio": Gateway("Istio"),
    "nginx": Gateway("NGINX Gateway Fabric", lists=False, headers=False, responses=False, metadata=False),
    "gke": Gateway("GKE Gateway"),
}


def gateway_findings(config: EffectiveConfig, name: str, source: str) -> list[ConfigWarning]:
    """Returns the warnings for the gateway `name`, a key of `GATEWAYS`. `source` names the file."""
    gateway = GATEWAYS[name]
    found: list[ConfigWarning] = []

    def warn(rule: str, message: str, hint: str) -> None:
        found.append(ConfigWarning(source, WHOLE.line, WHOLE.column, rule, message, hint))

    if config.tenants is not None and not gateway.headers:
        why = f"tenants: {gateway.title} passes on the client's own headers, also fairness ids and API keys that the picker removes"
        warn("gateway-headers", why, "use another gateway, or make sure that model servers ignore these headers")
    reads = _readers(config)
    for written in config.document["plugins"]:
        plugin, kind = written["name"], written["type"]
        count = written.get("parameters", {}).get("maxNumOfEndpoints", 1)
        if not gateway.lists and count > 1:
            warn(
                "gateway-list",
                f"plugin '{plugin}': maxNumOfEndpoints {count}: {gateway.title} takes one endpoint",
                "omit maxNumOfEndpoints",
            )
        if not gateway.headers and kind in SETS_HEADERS:
            warn(
                "gateway-headers",
                f"plugin '{plugin}': {gateway.title} does not pass on the headers that {kind} sets",
                "use another gateway",
            )
        if not gateway.metadata and kind in SENDS_METADATA:
            warn("gateway-metadata", f"plugin '{plugin}': {gateway.title} ignores dynamic metadata", "omit it")
        if not gateway.responses and (kind in reads or kind in COUNTS_IN_FLIGHT):
            warn(
                "gateway-response",
                f"plugin '{plugin}': {gateway.title} shows the picker no response, and no request is counted as in flight",
                "use a plugin that needs scraped values only, or another gateway",
            )
    return found


def _readers(config: EffectiveConfig) -> set[str]:
    """Returns the types of the plugins that read responses."""
    pipeline = config.pipeline
    calls = (*pipeline.response_received, *pipeline.response_streaming, *pipeline.response_complete)
    owners = (pipeline.owner(call) for call in calls)
    return {type(owner).type_name for owner in owners if owner is not None}
