"""Reads the parameter `inFlightLoadProducerName`. The name has no effect on the counts: they are made once, for all plugins."""

from collections.abc import Mapping
from typing import Final

from epp.plugin import DataProducer, Need

INFLIGHT_LOAD: Final = "inflight-load-producer"  # this producer counts the values of the column INFLIGHT_TOKENS


def named_load(name: str) -> Mapping[str, Need]:
    """Returns the `needs` of a plugin with the parameter `inFlightLoadProducerName: name`. The named producer must exist."""
    return {} if name in ("", INFLIGHT_LOAD) else {"load": Need("inFlightLoadProducerName", name, DataProducer)}
