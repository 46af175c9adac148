"""Our own plugins read and write only what they declare, at every extension point. Nothing enforces this at run time.

Each plugin handles a request with the data of all registered producers. An access to undeclared data fails the test.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from compiled.finder import choose
from epp.candidates import Candidates, Mask
from epp.config import registry
from epp.config.contracts import STAGES
from epp.data import ACTIVE_MODELS, WAITING_MODELS, Column
from epp.decision import decide
from epp.decision.decision import Decision, ProfileRun, Response, Usage
from epp.errors import PluginFault, ProducerFailed, Refused
from epp.plugin import (
    Admitter,
    DataProducer,
    Decider,
    Filter,
    Picker,
    Plugin,
    PreRequest,
    Profile,
    ProfileHandler,
    RequestHeader,
    ResponseComplete,
    ResponseReceived,
    ResponseStreaming,
    Scorer,
    Screener,
)
from epp.plugins.pickers.max_score import MaxScore
from epp.points import guard
from epp.points.instrument import Point
from epp.request import Request
from tests.contract.test_every_plugin import PROFILE, REQUIRED, made, of
from tests.fakes import candidates, request
from tests.modes import interpreted_only

registry.known()
ENDS = (Refused, ProducerFailed)
ON_THE_WAY = [cls for cls in of(Plugin) if any(issubclass(cls, kinds) for kinds in STAGES)]
PICKER = made(MaxScore)


if not choose().compiled:

    class Watched(Candidates):
        """Candidates with only the columns that the plugin declares."""

        __slots__ = ("allowed",)

        def __getitem__(self, column: Column[Any]) -> Any:
            assert column.name in self.allowed, f"reads column '{column.name}', which it does not declare"
            return super().__getitem__(column)

        def keep(self, mask: Mask) -> "Candidates":
            kept = super().keep(mask)
            return kept if kept is self else watched(kept, self.allowed)


def named(cls: type[Plugin]) -> Plugin:
    """An instance before its start."""
    return cls(cls.type_name, msgspec.convert(REQUIRED.get(cls.type_name, {}), cls.Params))


def watched(plain: Candidates, allowed: frozenset[str]) -> "Watched":
    made = Watched(plain.snapshot, plain._inflight, plain._tokens, plain.rows)
    made.allowed = allowed
    return made


def situation() -> Candidates:
    names = (
        "waiting_requests",
        "running_requests",
        "kv_cache_usage",
        "max_lora",
        "cache_block_size",
        "cache_num_blocks",
        "cache_ranks",
        "cache_tokens",
    )
    models = [frozenset(("m",)), frozenset(("a",)), frozenset[str]()]
    return candidates(
        {name: [0.5, 3.0, 9.0] for name in names},
        names={ACTIVE_MODELS.name: models, WAITING_MODELS.name: models},
        labels=[{"llm-d.ai/role": "decode"}, {"llm-d.ai/role": "prefill"}, {}],
    )


class Watch:
    """One plugin under observation. `call` runs one of its methods."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.columns = frozenset(key.name for key in plugin.consumes if isinstance(key, Column))

    def call(self, point: Point, method: Callable[..., Any], r: Request, *more: Any) -> Any:
        with contextlib.suppress(*ENDS):
            return guard._guarded(point, self.plugin, method, self.fail)(r, *more)
        return None

    def fail(self, point: Point, plugin: Plugin, access: str) -> None:
        pytest.fail(f"'{plugin.name}' at {point.value}: {access} of data that it does not declare")

    def seen(self, plain: Candidates) -> Candidates:
        return watched(plain, self.columns)


def requested(plugin: Plugin) -> Request:
    """A request with the data of all producers that this plugin reads from."""
    r = request(b"a long enough prompt, " * 60, headers={"x-session-id": "s", "x-session-token": "t"})
    read = {key.name for key in (*plugin.consumes, *plugin.optional)}
    for cls in of(DataProducer):
        if not read & {key.name for key in named(cls).produces}:
            continue
        with contextlib.suppress(*ENDS):
            made(cls).produce(r, situation())  # type: ignore[attr-defined]
    return r


def decided() -> Decision:
    plain = situation()
    run = ProfileRun(plain, plain.zeros(), [0])
    return Decision(run.targets, {"default": run}, "default")


def before_the_decision(watch: Watch, plugin: Plugin, r: Request) -> None:
    seen = watch.seen(situation())
    if isinstance(plugin, RequestHeader):
        watch.call(Point.REQUEST_HEADER, plugin.read, r)
    if isinstance(plugin, Screener):
        watch.call(Point.SCREENER, plugin.screen, r, seen)
    if isinstance(plugin, DataProducer):
        watch.call(Point.PRODUCER, plugin.produce, r, seen)
    if isinstance(plugin, Admitter):
        watch.call(Point.ADMITTER, plugin.admit, r, seen)
    if isinstance(plugin, Decider):
        for run in (None, decided().runs["default"]):
            watch.call(Point.REQUEST_HEADER, plugin.wanted, r, run)


def in_a_profile(watch: Watch, plugin: Plugin, r: Request) -> None:
    seen = watch.seen(situation())
    r.profile = PROFILE.name
    if isinstance(plugin, Filter):
        watch.call(Point.FILTER, plugin.keep, r, seen, PROFILE)
    if isinstance(plugin, Scorer):
        watch.call(Point.SCORER, plugin.score, r, seen, PROFILE)
    if isinstance(plugin, Picker):
        watch.call(Point.PICKER, plugin.pick, r, seen, np.ones(len(seen)), PROFILE)


def after_the_decision(watch: Watch, plugin: Plugin, r: Request) -> None:
    decision, response = decided(), Response(200, {"content-type": "application/json"})
    if isinstance(plugin, PreRequest):
        watch.call(Point.PRE_REQUEST, plugin.before_send, r, decision)
    if isinstance(plugin, ResponseReceived):
        watch.call(Point.RESPONSE_RECEIVED, plugin.response_received, r, decision, response)
    if isinstance(plugin, ResponseStreaming):
        watch.call(Point.RESPONSE_STREAMING, plugin.response_streaming, r, decision)
    response.usage = Usage(10, 5, 2)
    if isinstance(plugin, ResponseComplete):
        watch.call(Point.RESPONSE_COMPLETE, plugin.response_complete, r, decision, response)


def profiles_chosen(watch: Watch, handler: ProfileHandler, r: Request) -> None:
    offered = {name: Profile(name, (), (), PICKER) for name in ("decode", "prefill", "encode")}
    for names in (("decode",), ("decode", "prefill"), ("decode", "prefill", "encode")):
        profiles = {name: offered[name] for name in names}
        runs: dict[str, ProfileRun | None] = {}
        for _ in range(decide.PROFILE_ROUNDS_MAX):
            picked = watch.call(Point.PROFILE_PICKER, handler.pick, r, profiles, runs)
            if not picked:
                break
            runs |= {profile.name: decide.run(profile, r, situation()) for profile in picked}
        if runs and handler.check(names) is None:
            watch.call(Point.PROFILES_RESULT, handler.result, r, runs)


@interpreted_only("watches the reads through a subclass")
@pytest.mark.parametrize("cls", ON_THE_WAY, ids=lambda cls: cls.type_name)
def test_a_plugin_reads_and_writes_only_what_it_declares(cls: type[Plugin]) -> None:
    plugin = made(cls)
    watch = Watch(plugin)
    for r in (requested(plugin), request(b"x" * 2000)):
        before_the_decision(watch, plugin, r)
        if isinstance(plugin, ProfileHandler) and not plugin.needs:
            profiles_chosen(watch, plugin, r)
        in_a_profile(watch, plugin, r)
        after_the_decision(watch, plugin, r)


@interpreted_only("watches the reads through a subclass")
def test_an_undeclared_read_is_detected() -> None:
    class Undeclared(Filter):
        def keep(self, r: Request, seen: Candidates, profile: Profile) -> Mask:
            return seen[Column("waiting_requests", int)] > 0  # type: ignore[no-any-return]

    with pytest.raises(PluginFault, match="reads the column 'waiting_requests', which it does not declare"):
        in_a_profile(Watch(Undeclared("c", None)), Undeclared("c", None), request())


def test_every_instance_keeps_its_data_under_its_own_name() -> None:
    """Two instances of one type do not see each other's data."""
    for cls in ON_THE_WAY:
        first = named(cls)
        second = cls("another", first.params)
        assert not {key.name for key in first.keeps} & {key.name for key in second.keeps}, cls.type_name
