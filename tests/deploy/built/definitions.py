"""Definitions of kinds from gateways, service meshes and monitoring: the names, and the used fields with their required parts."""

from typing import Any

from tests.kube.objects import definition

Json = dict[str, Any]

_ANY: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TEXT: Json = {"type": "string"}


def _list(required: list[str], **fields: Json) -> Json:
    return {"type": "array", "items": {"type": "object", "required": required, "properties": fields}}


_RULE = {
    "matches": _list(["path"], path=_ANY, headers=_list(["name", "value"], type=_TEXT, name=_TEXT, value=_TEXT)),
    "backendRefs": _list(["name"], group=_TEXT, kind=_TEXT, name=_TEXT),
    "timeouts": {"type": "object", "properties": {"request": {**_TEXT, "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}}},
}
_ROUTE: Json = {
    "type": "object",
    "properties": {"parentRefs": _list(["name"], group=_TEXT, kind=_TEXT, name=_TEXT, namespace=_TEXT), "rules": _list([], **_RULE)},
}
_MONITOR: Json = {
    "type": "object",
    "required": ["endpoints", "selector"],
    "properties": {
        "endpoints": _list(["port"], port=_TEXT, path=_TEXT, interval=_TEXT, authorization=_ANY),
        "namespaceSelector": _ANY,
        "selector": _ANY,
    },
}
_GROUPS: Json = {
    "type": "object",
    "required": ["groups"],
    "properties": {
        "groups": _list(
            ["name", "rules"],
            name=_TEXT,
            rules=_list(["alert", "expr"], alert=_TEXT, expr=_TEXT, labels=_ANY, annotations=_ANY, **{"for": _TEXT}),
        )
    },
}
_DESTINATION: Json = {"type": "object", "required": ["host"], "properties": {"host": _TEXT, "trafficPolicy": _ANY}}

DEFINITIONS = (
    definition("gateway.networking.k8s.io", "v1", "HTTPRoute", _ROUTE),
    definition("monitoring.coreos.com", "v1", "ServiceMonitor", _MONITOR),
    definition("monitoring.coreos.com", "v1", "PrometheusRule", _GROUPS),
    definition("networking.istio.io", "v1", "DestinationRule", _DESTINATION),
)
