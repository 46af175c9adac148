"""Syncers share state between the replicas of a picker.

The reference picker's syncer, a Redis, is accepted: its parameters are checked, but the picker does not connect to the Redis.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from epp.plugin import Syncer, plugin
from epp.quantities import named_duration

TTL_MIN_S = 0.001


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Address, access and times, as in the reference picker.

    address: Host and port of the Redis.
    password: Refused, as in the reference picker: name a variable or a file instead.
    password_env: The environment variable with the password.
    password_file: The file with the password.
    db: The number of the database.
    state_ttl: How long the state of a replica is valid without news.
    coordination_ttl: How long agreements of replicas about one request are kept.
    ttl: The older form of `coordination_ttl`.
    """

    address: Annotated[str, msgspec.Meta(min_length=1)] = "localhost:6379"
    password: str = ""
    password_env: str = ""
    password_file: str = ""
    db: Annotated[int, msgspec.Meta(ge=0)] = 0
    state_ttl: str = msgspec.field(default="2s", name="stateTTL")
    coordination_ttl: str = msgspec.field(default="180s", name="coordinationTTL")
    ttl: str = ""


@plugin("redis-syncer", "redis-state-store")
class RedisSyncer(Syncer):
    """Accepted for configurations of the reference picker. It connects to no server: `--replica-store` names the store of replicas."""

    Params = Parameters
    renamed: ClassVar[Mapping[str, str]] = {"ttl": "coordinationTTL"}

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        if params.password:
            raise ValueError("password: is refused in plain text; name passwordEnv or passwordFile")
        if params.password_env and params.password_file:
            raise ValueError("passwordFile: is given beside passwordEnv; name one of them")
        if params.ttl:
            self.deprecated = self.renamed
        for field, text in (("stateTTL", params.state_ttl), ("coordinationTTL", params.coordination_ttl), ("ttl", params.ttl)):
            if text and named_duration(field, text) < TTL_MIN_S:
                raise ValueError(f"{field}: '{text}' is below 1ms; write for example 2s, or omit it")
