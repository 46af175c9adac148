"""What is in flight, as parameters name who counts it: it is counted once, for all plugins of a configuration."""

from collections.abc import Mapping
from typing import Final

from epp.plugin import DataProducer, Need

INFLIGHT_LOAD: Final = "inflight-load-producer"  # it counts what the column INFLIGHT_TOKENS shows


def named_load(name: str) -> Mapping[str, Need]:
    """The `needs` of a plugin whose `inFlightLoadProducerName` is `name`: a producer that is named must exist."""
    return {} if name in ("", INFLIGHT_LOAD) else {"load": Need("inFlightLoadProducerName", name, DataProducer)}
