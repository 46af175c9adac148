"""Changes of Envoy's configuration that several tests make: around the filter that calls the picker."""

from collections.abc import Callable
from typing import Any

import yaml

Json = dict[str, Any]
TYPES = "type.googleapis.com/envoy."
DESTINATION = "x-gateway-destination-endpoint"


def changed(edit: Callable[[Json, Json, Json], None]) -> Callable[[str], str]:
    """Applies `edit` to the connection manager, the settings of the picker's filter, and the bootstrap."""

    def change(text: str) -> str:
        config = yaml.safe_load(text)
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        (picker,) = [f for f in manager["http_filters"] if "processing_mode" in f["typed_config"]]
        edit(manager, picker, config["static_resources"])
        return yaml.safe_dump(config)

    return change


def narrowed(subset: list[str]) -> Callable[[str], str]:
    """Returns a change that adds a filter before the picker's. The filter names a subset of the pool in its metadata."""

    def edit(manager: Json, picker: Json, _resources: Json) -> None:
        hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": {f"{DESTINATION}-subset": subset}}
        manager["http_filters"].insert(
            0, {"name": "hint", "typed_config": {"@type": TYPES + "extensions.filters.http.set_metadata.v3.Config", "metadata": [hint]}}
        )
        picker["typed_config"] |= {
            "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]}},
            "request_attributes": ["request.path", "request.headers", "source.address", "xds.cluster_name"],
            "response_attributes": ["response.code", "upstream.address"],
        }

    return changed(edit)
