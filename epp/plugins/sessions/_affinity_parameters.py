"""The parameters of `epp.plugins.sessions._affinity`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Final, Literal

import msgspec

TOKEN_HEADER: Final = "x-session-token"
COUNTS_WITH: Final = {
    "encodedEndpointHeaderConfig": ("strategy", ("encoded_endpoint_header",)),
    "sessionIdConfig": ("strategy", ("session_id",)),
}


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class EncodedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The header that names the endpoint.

    header: The header of responses and requests that names the endpoint; empty means the default.
    """

    header: str = TOKEN_HEADER


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where to read a session id: a request header, or a datum that a plugin emits. Give exactly one of `header` and `attribute`.

    header: The request header.
    attribute: The name of the datum.
    producer: The plugin that emits the datum, if the datum belongs to one.
    """

    header: str = ""
    attribute: str = ""
    producer: str = ""


class SessionParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where session ids come from, and how long they are bound. A time of 0 means the default.

    sources: Tried in order until one has an id. Default: the header `x-session-id`.
    eviction_ttl_seconds: How long an unused binding is kept.
    eviction_sweep_seconds: The time between two searches for unused bindings.
    """

    sources: tuple[Source, ...] = ()
    eviction_ttl_seconds: Seconds = 300.0
    eviction_sweep_seconds: Seconds = 10.0


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How a session is recognised. Only the part for the chosen `strategy` has an effect.

    strategy: Put the endpoint into a header, or bind session ids to endpoints.
    encoded_endpoint_header_config: For the strategy with a header.
    session_id_config: For the strategy with session ids.
    profile_name: The profile to pin; empty means the primary one.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedParameters = EncodedParameters()
    session_id_config: SessionParameters = SessionParameters()
    profile_name: str = ""
