"""Plugins for tests of configurations, named there as `tests.epp.config_plugins:<Class>`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from epp.data import INFLIGHT_TOKENS, WAITING, Column, Datum, Key
from epp.plugin import DataProducer, DataSource, Extractor, Filter, Need, Plugin, PreRequest, ProfileHandler, SaturationDetector, Scorer
from epp.plugins.extractors.core_metrics import CoreMetricsExtractor

HERE = __name__
LENGTH = Datum("length", int)
LENGTH_AS_TEXT = Datum("length", str)
HEAT = Column("heat", float)


class Idle:
    """The methods of plugins that are put together here and never run."""

    def never(self, *given: Any) -> Any:
        raise AssertionError(given)

    keep = score = produce = before_send = pick = result = saturation = never


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    max_value: Annotated[float, msgspec.Meta(ge=0, le=1)]
    metric: str = "kv"


class StrictParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    file_name: str
    conditions: list[Limit] = []
    labels: dict[str, str] = {}
    retries: Annotated[int, msgspec.Meta(ge=1)] = 3
    nested: Limit | None = None


class Strict(Idle, Filter):
    Params = StrictParams

    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        if params.file_name == "refused":
            raise ValueError("fileName: no such file")
        if params.file_name == "broken":
            raise RuntimeError("it broke")


class Plain(Idle, Filter):
    """A filter that reads nothing."""


class ReadsLength(Idle, Scorer):
    consumes: Sequence[Key[Any]] = (LENGTH,)


class ReadsLengthAsText(Idle, Scorer):
    consumes: Sequence[Key[Any]] = (LENGTH_AS_TEXT,)


class ReadsHeat(Idle, Scorer):
    consumes: Sequence[Key[Any]] = (HEAT,)


class ReadsTokens(Idle, Scorer):
    consumes: Sequence[Key[Any]] = (INFLIGHT_TOKENS,)


class ReadsWaitingLow(Idle, Scorer):
    consumes: Sequence[Key[Any]] = (Column("waiting_requests", int, worst="low"),)


class MakesLength(Idle, DataProducer):
    produces: Sequence[Key[Any]] = (LENGTH,)


class MakesLengthAndHooks(Idle, DataProducer, PreRequest):
    produces: Sequence[Key[Any]] = (LENGTH,)


class Ping(Idle, DataProducer):
    produces: Sequence[Key[Any]] = (Datum("ping", int),)
    consumes: Sequence[Key[Any]] = (Datum("pong", int),)


class Pong(Idle, DataProducer):
    produces: Sequence[Key[Any]] = (Datum("pong", int), LENGTH)
    consumes: Sequence[Key[Any]] = (Datum("ping", int),)


class OtherWaiting(Extractor):
    produces: Sequence[Key[Any]] = (WAITING, HEAT)


class OtherSource(DataSource):
    pass


class HeirOfCoreMetrics(CoreMetricsExtractor):
    pass


class Shy(Idle, PreRequest):
    def meet(self, plugins: Sequence[Plugin]) -> None:
        raise RuntimeError("so many")


class OtherHandler(Idle, ProfileHandler):
    pass


class OnlyFirst(Idle, ProfileHandler):
    """Runs the first profile, and says so."""

    def reaches(self, profiles: Sequence[str]) -> Sequence[str]:
        return profiles[:1]

    def check(self, profiles: Sequence[str]) -> str | None:
        return "it was offered a shadow" if "c" in profiles else None


class Detector(Idle, SaturationDetector):
    pass


class StaleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    metrics_staleness_threshold: str = "200ms"


class Stale(Idle, SaturationDetector):
    Params = StaleParams


class Naming(Idle, Filter):
    """Names another plugin of its kind."""

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        other: str = ""

    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        if params.other:
            self.needs = {"other": Need("other", params.other, Naming)}

    def resolve(self, found: Mapping[str, Plugin]) -> None:
        self.other = found.get("other")


class NoPlugin:
    pass
