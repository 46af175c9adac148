"""Translates the values of the charts of the Gateway API Inference Extension (GIE) into those of this chart.

    MOVED       the same value under another name
    CONVERTED   another form of the value
    DROPPED     values without a counterpart, with the reason

Source: `config/charts/inferencepool`, `epplib` and `standalone` of github.com/kubernetes-sigs/gateway-api-inference-extension, tags v0.5.0
to v1.5.0. The text of a configuration among the values is migrated, too (`epp.config.migrate`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from epp.config.load import ConfigErrors
from epp.config.migrate import migrate
from workers.cli.manifests.layers import merged
from workers.cli.manifests.values import Json, Proxy

EXTENSION, POOL = "inferenceExtension", "inferencePool"
OLDER: Final = (EXTENSION, POOL, "inferenceObjectives", "experimentalHttpRoute", "istio", "gke")  # top-level names that this chart lacks
_KEY: Final = re.compile(rf"^['\"]?({EXTENSION}|{POOL})['\"]?\s*:", re.MULTILINE)
_SAME: Final = (
    "affinity", "env", "extProcPort", "extraContainerPorts", "metricsDataSource", "pluginsConfigFile", "replicas", "resources",
    "tolerations", "volumeMounts", "volumes",
)  # fmt: skip
MOVED: Final[Mapping[str, str]] = {
    **{f"{EXTENSION}.{name}": f"router.epp.{name}" for name in _SAME},
    f"{EXTENSION}.image.pullPolicy": "router.epp.image.pullPolicy",
    f"{EXTENSION}.enablePprof": "router.epp.flags.enable-pprof",
    f"{EXTENSION}.enableLeaderElection": "router.epp.flags.ha-enable-leader-election",
    f"{EXTENSION}.logVerbosity": "router.epp.flags.v",
    f"{EXTENSION}.modelServerMetricsPath": "router.epp.metricsDataSource.path",
    f"{EXTENSION}.modelServerMetricsScheme": "router.epp.metricsDataSource.scheme",
    f"{EXTENSION}.modelServerMetricsHttpsInsecureSkipVerify": "router.epp.metricsDataSource.insecureSkipVerify",
    f"{EXTENSION}.extraServicePorts": "router.extraServicePorts",
    f"{EXTENSION}.failureMode": "router.inferencePool.failureMode",
    f"{EXTENSION}.metricsPort": "router.metricsPort",
    f"{EXTENSION}.monitoring.interval": "router.monitoring.interval",
    f"{EXTENSION}.monitoring.prometheus": "router.monitoring.prometheus",
    f"{EXTENSION}.tracing": "router.tracing",
    f"{EXTENSION}.endpointsServer.createInferencePool": "router.inferencePool.create",
    f"{EXTENSION}.endpointsServer.modelServerType": "router.modelServers.type",
    f"{EXTENSION}.endpointsServer.modelServerProtocol": "router.modelServers.protocol",
    f"{POOL}.targetPorts": "router.modelServers.targetPorts",
    f"{POOL}.modelServerType": "router.modelServers.type",
    f"{POOL}.modelServerProtocol": "router.modelServers.protocol",
    f"{POOL}.modelServers.matchLabels": "router.modelServers.matchLabels",
    "inferenceObjectives": "router.inferenceObjectives",
    "experimentalHttpRoute.enabled": "httpRoute.create",
    "experimentalHttpRoute.inferenceGatewayName": "httpRoute.inferenceGatewayName",
    "experimentalHttpRoute.baseModel": "httpRoute.baseModel",
    "experimentalHttpRoute.requestTimeout": "httpRoute.requestTimeout",
    "istio.destinationRule": "provider.istio.destinationRule",
}
_IMAGE: Final = "names GIE's picker; name the image of this one with router.epp.image, or with --image"
_GKE: Final = "this chart has no objects for GKE; apply them beside it"
DROPPED: Final[Mapping[str, str]] = {
    **{f"{EXTENSION}.image.{name}": _IMAGE for name in ("hub", "name", "registry", "repository", "tag")},
    f"{EXTENSION}.monitoring.gke": _GKE,
    "gke": _GKE,
    "provider.gke": _GKE,
}
PROXY_PORT: Final = Proxy().port
POOL_VERSION: Final = "inference.networking.k8s.io/v1"


def are_values(text: str) -> bool:
    """Returns whether a text has the values of one of GIE's charts. Decides without parsing the text."""
    return _KEY.search(text) is not None


def translated(values: Json) -> tuple[Json, list[str]]:
    """Returns values of this chart that mean the same, and a remark for each value without a counterpart.

    If the values are those of this chart, returns them unchanged. The values are not checked.
    """
    if not any(name in values for name in OLDER):
        return values, []
    translation = _Translation()
    translation.walk(values, "")
    return translation.result()


class _Translation:
    def __init__(self) -> None:
        self._layers: list[Json] = []  # a later layer takes precedence
        self._remarks: list[str] = []

    def result(self) -> tuple[Json, list[str]]:
        values = merged(self._layers)
        router = values.get("router", {})
        if router.get("mode") == "standalone" and isinstance(more := router.get("extraServicePorts"), list):
            # The Service of standalone mode has the proxy's port already.
            router["extraServicePorts"] = [one for one in more if not (isinstance(one, dict) and one.get("port") == PROXY_PORT)]
        return values, list(dict.fromkeys(self._remarks))

    def walk(self, value: Any, at: str) -> None:
        """Translates the value at a path, and all values below it."""
        if value is None:
            return
        if at in MOVED:
            self._put(MOVED[at], value)
        elif at in _CONVERTED:
            _CONVERTED[at](self, value)
        elif at in DROPPED:
            if value not in ("", {}, []) and value != {"enabled": False} and value != {"autopilot": False}:
                self._remark(at, DROPPED[at])
        elif at.partition(".")[0] in ("router", "httpRoute", "provider"):
            self._put(at, value) if not isinstance(value, dict) else self._below(value, at)
        elif isinstance(value, dict) and (not at or at in SECTIONS):
            self._below(value, at)
        else:
            self._remark(at, "has no counterpart here")

    def _below(self, values: Json, at: str) -> None:
        for name, value in values.items():
            self.walk(value, f"{at}.{name}" if at else str(name))

    def _put(self, path: str, value: Any) -> None:
        for name in reversed(path.split(".")):
            value = {name: value}
        self._layers.append(value)

    def _remark(self, at: str, why: str) -> None:
        shown = at.rpartition(".")[0] if at.startswith(f"{EXTENSION}.image.") else at
        self._remarks.append(f"{shown} is left out: {why}")

    # Other forms.

    def flags(self, value: Any) -> None:
        """Flags were a list of names and values in version 1.0, and a mapping later."""
        if isinstance(value, list):
            value = {str(one.get("name")): one.get("value") for one in value if isinstance(one, dict)}
        self._put("router.epp.flags", value)

    def configurations(self, value: Any) -> None:
        """Migrates the configurations."""
        new = {}
        for name, text in value.items() if isinstance(value, dict) else ():
            new[name] = text
            try:
                new[name], remarks = migrate(str(text), name)
            except ConfigErrors as unreadable:
                remarks = [f"not migrated: {unreadable}"]
            self._remarks += [f"{name}: {remark}" for remark in remarks]
        self._put("router.epp.pluginsCustomConfig", new)

    def port(self, value: Any) -> None:
        """One port of all servers, which is used if there is no list of ports."""
        path = "router.modelServers.targetPorts"
        if isinstance(value, int | str) and str(value).replace(",", "").isdecimal():
            value = [{"number": int(port)} for port in str(value).split(",") if port]
        if not any("targetPorts" in layer.get("router", {}).get("modelServers", {}) for layer in self._layers):
            self._put(path, value)

    def selector(self, value: Any) -> None:
        pairs = [part.partition("=") for part in str(value).split(",") if part]
        self._put("router.modelServers.matchLabels", {name.strip(): label.strip() for name, _, label in pairs})

    def sidecar(self, value: Any) -> None:
        if isinstance(value, dict) and value.get("enabled"):
            self._put("router.mode", "standalone")
            self._remark(f"{EXTENSION}.sidecar", "standalone mode brings an Envoy with its own configuration (router.proxy)")

    def predictor(self, value: Any) -> None:
        if isinstance(value, dict) and value.get("enabled"):
            self._remark(f"{EXTENSION}.latencyPredictor", "the picker learns latencies itself (learned-latency-producer in its default)")

    def parser(self, value: Any) -> None:
        if value:
            self._put("router.epp.parsers", [value])

    def version(self, value: Any) -> None:
        if value != POOL_VERSION:
            self._remark(f"{POOL}.apiVersion", f"only {POOL_VERSION} is supported; install that CRD")

    def provider(self, value: Any) -> None:
        if value == "gke":
            self._remark("provider.name", _GKE)
        else:
            self._put("provider.name", value)


_CONVERTED: Final[Mapping[str, Callable[[_Translation, Any], None]]] = {
    f"{EXTENSION}.flags": _Translation.flags,
    f"{EXTENSION}.pluginsCustomConfig": _Translation.configurations,
    f"{EXTENSION}.endpointsServer.targetPorts": _Translation.port,
    f"{EXTENSION}.endpointsServer.endpointSelector": _Translation.selector,
    f"{EXTENSION}.sidecar": _Translation.sidecar,
    f"{EXTENSION}.latencyPredictor": _Translation.predictor,
    f"{EXTENSION}.apiVersion": _Translation.version,
    f"{POOL}.apiVersion": _Translation.version,
    f"{POOL}.targetPortNumber": _Translation.port,
    f"{POOL}.parser": _Translation.parser,
    "provider.name": _Translation.provider,
}
SECTIONS: Final = frozenset(
    ".".join(path.split(".")[:length]) for path in (*MOVED, *DROPPED, *_CONVERTED) for length in range(1, path.count(".") + 1)
)
