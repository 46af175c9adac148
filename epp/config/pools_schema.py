"""The form of a pools file: structs with all its fields and their meaning, and a JSON Schema for editors.

`epp.config.pools` takes the field names from these structs, so the two cannot differ. The structs are never filled.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from epp.config.schema import DIALECT
from epp.config.schema_shape import pointed

TITLE: Final = "PoolsFile"
PORT_MAX: Final = 65_535
ENDPOINTS_MAX: Final = 65_536
POOLS_MAX: Final = 1000
TARGET_PORTS_MAX: Final = 8

Text = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=1, le=PORT_MAX)]
Count = Annotated[int, Meta(ge=1, le=ENDPOINTS_MAX)]


class _Form(msgspec.Struct, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Base of all parts. Unknown fields are refused."""


class PoolForm(_Form):
    """A pool of model servers."""

    name: Annotated[Text, Meta(description="The name of the pool in metrics, logs and commands.")]
    port: Annotated[Port | None, Meta(description="An ext_proc port of the pool's own.")] = None
    authorities: Annotated[
        list[Text] | None, Meta(description="The `:authority` values with which gateways call the picker for this pool. `*`: any text.")
    ] = None
    models: Annotated[list[Text] | None, Meta(description="The models whose requests belong to the pool. `*`: any text.")] = None
    config_file: Annotated[Text | None, Meta(description="The pool's configuration: a file, relative to this one.")] = None
    config: Annotated[Text | None, Meta(description="The pool's configuration as text, instead of configFile.")] = None
    endpoints: Annotated[list[Text] | None, Meta(description="The model servers, as host:port.")] = None
    max_endpoints: Annotated[Count | None, Meta(description="How many endpoints the pool may have.")] = None
    selector: Annotated[Text | None, Meta(description="In Kubernetes: a label selector of the pods that are endpoints.")] = None
    target_ports: Annotated[
        Annotated[list[Port], Meta(min_length=1, max_length=TARGET_PORTS_MAX)] | None,
        Meta(description="With selector: the ports of the pods."),
    ] = None
    pool_name: Annotated[Text | None, Meta(description="In Kubernetes: the InferencePool that has the endpoints.")] = None
    namespace: Annotated[Text | None, Meta(description="The namespace of the InferencePool or of the pods.")] = None


class DefaultsForm(_Form):
    """What holds for pools that do not say it themselves."""

    config_file: Annotated[Text | None, Meta(description="The configuration: a file, relative to this one.")] = None
    max_endpoints: Annotated[Count | None, Meta(description="How many endpoints a pool may have.")] = None


class PoolsForm(_Form):
    """The pools that one picker serves: epp serve --pools-file FILE."""

    pools: Annotated[list[PoolForm], Meta(min_length=1, max_length=POOLS_MAX, description="All pools.")]
    defaults: Annotated[DefaultsForm | None, Meta(description="What holds for pools that do not say it themselves.")] = None


def pools_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a pools file."""
    (root,), parts = msgspec.json.schema_components([PoolsForm], ref_template="#/$defs/{name}")
    for part in parts.values():
        for field in part["properties"].values():
            field.pop("default", None)  # null: it is not given
    return {"$schema": DIALECT, "title": TITLE, **root, "$defs": dict(sorted(pointed(parts).items()))}
