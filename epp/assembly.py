"""Document -> instances that are wired to each other: defaults added, references resolved, contracts held.

The order is that of the rules in the field's reference picker: profiles, profile handler, pickers,
parsers, saturation detector, data layer, data producers. What this does not do: read text, or
compile. It goes on after an error as far as it can, so that all are seen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epp import contracts, registry, response_phase
from epp.data import INFLIGHT_TOKENS, Column
from epp.document import FLOW_CONTROL_GATE, Document, ProfileEntry, Ref
from epp.findings import WHOLE, Findings, Place
from epp.flow.plan import FlowPlan
from epp.flow_assembly import POLICIES, plan, plugins_of
from epp.inflight_load import INFLIGHT_LOAD
from epp.pipeline import WiredProfile
from epp.plugin import (
    Admitter,
    DataProducer,
    DataSource,
    Discovery,
    DisplacementPolicy,
    EvictionFilter,
    EvictionOrder,
    Extractor,
    FairnessPolicy,
    Filter,
    FlowQueue,
    OrderingPolicy,
    Parser,
    Picker,
    Plugin,
    ProfileHandler,
    RequestHeader,
    SaturationDetector,
    Scorer,
    Screener,
    UsageLimitPolicy,
    foreign,
)  # fmt: skip
from epp.response_phase import NONE
from epp.stock import Stock, kinds_of

SCHEDULING = (Filter, Scorer, Picker)
BY_THEMSELVES = (*contracts.HOOKS, RequestHeader, Screener, Admitter)  # what runs for being configured
DEFAULT_PROFILE = "default"
DEFAULT_HANDLER = "single-profile-handler"
DEFAULT_PICKER = "max-score-picker"
DEFAULT_PARSERS = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")
DEFAULT_DETECTOR = "utilization-detector"
DEFAULT_SOURCE = "metrics-data-source"
DEFAULT_EXTRACTOR = "core-metrics-extractor"
DEFAULT_PRODUCERS = (
    "approx-prefix-cache-producer", INFLIGHT_LOAD, "predicted-latency-producer",
    "mm-embeddings-cache-producer", "token-producer", "session-id-producer",
)  # fmt: skip
DEFAULT_WEIGHT = 1.0
BAND = "flowControl.defaultPriorityBand"
REFERENCES: Mapping[type[Plugin], str] = {  # where those are named that are in no profile
    FlowQueue: f"{BAND}.queueRef",
    OrderingPolicy: f"{BAND}.orderingPolicyRef",
    FairnessPolicy: f"{BAND}.fairnessPolicyRef",
    DisplacementPolicy: f"{BAND}.displacementPolicyRef",
    UsageLimitPolicy: "flowControl.usageLimitPolicyPluginRef",
    SaturationDetector: "flowControl.saturationDetector.pluginRef",
    Parser: "requestHandler.parsers",
    DataSource: "dataLayer.sources",
    Extractor: "dataLayer.sources",
    Discovery: "dataLayer.discovery.pluginRef",
}
EVICTING = (EvictionFilter, EvictionOrder)


@dataclass(frozen=True, slots=True)
class Scraped:
    """A data source and what reads its pages."""

    source: DataSource
    extractors: tuple[Extractor, ...]


@dataclass(slots=True)
class Assembly:
    """What a configuration comes to. Complete only if no error was found."""

    plugins: dict[str, Plugin]
    types: dict[str, str]  # as a configuration is to name them
    profiles: list[WiredProfile] = field(default_factory=list)
    handler: ProfileHandler | None = None
    parsers: list[Parser] = field(default_factory=list)
    sources: list[Scraped] = field(default_factory=list)
    discovery: Discovery | None = None
    saturation: SaturationDetector | None = None
    flow: FlowPlan | None = None
    producers: tuple[DataProducer, ...] = ()
    columns: tuple[Column[Any], ...] = ()


def assemble(document: Document, findings: Findings, *, allow_experimental: bool) -> Assembly:
    """Everything that the document asks for, and what it needs besides."""
    bench = _Bench(document, findings, Stock(document.plugins, findings, allow_experimental=allow_experimental))
    bench.stock.make()
    bench.wire_references()
    bench.wire_profiles()
    bench.wire_parsers()
    bench.wire_saturation()
    bench.assembly.flow = plan(document, bench.stock, findings, bench.assembly.saturation)
    bench.wire_data_layer()
    bench.drop_unused()
    if not (bench.stock.broken or bench.stock.unresolved):  # what is missing would only repeat itself here
        bench.wire_data()
        bench.check_response_phase()
    return bench.assembly


class _Bench:
    """The work on one assembly."""

    def __init__(self, document: Document, findings: Findings, stock: Stock) -> None:
        self.document = document
        self.findings = findings
        self.stock = stock
        self.assembly = Assembly(self.stock.plugins, self.stock.types)
        self.in_profiles: set[str] = set()
        self.named: set[str] = set()  # by other plugins' parameters

    # References between plugins

    def wire_references(self) -> None:
        listed = tuple(self.stock.plugins.values())
        for plugin in listed:
            self.told_off(plugin, plugin.meet, listed)
        for plugin in listed:
            found = {}
            for key, need in plugin.needs.items():
                place = self.stock.place_of(plugin.name, need.parameter)
                what = f"parameters.{need.parameter} of plugin '{plugin.name}'"
                if (named := self.stock.resolve(Ref(need.name, place), need.kind, what)) is not None:
                    found[key] = named
                    self.named.add(named.name)
            if len(found) == len(plugin.needs):
                self.told_off(plugin, plugin.resolve, found)
        self.check_reference_cycles()

    def told_off(self, plugin: Plugin, call: Callable[..., object], *given: object) -> None:
        """What a foreign plugin raises here is an error of the configuration that has it."""
        try:
            call(*given)
        except Exception as problem:
            if not foreign(type(plugin)):
                raise
            why = f"plugin '{plugin.name}': {type(problem).__name__}: {problem}"
            self.findings.error(self.stock.place(plugin.name), "bad-parameter", why)

    def check_reference_cycles(self) -> None:
        """Takes out who names nobody that is left, until nobody is left or all who are wait for each other."""
        left = {name: {need.name for need in plugin.needs.values()} for name, plugin in self.stock.plugins.items()}
        while free := [name for name, named in left.items() if not named & left.keys()]:
            for name in free:
                del left[name]
        if left:
            names = ", ".join(f"'{name}'" for name in left)
            why = f"plugins name each other by their parameters, in a circle: {names}"
            self.findings.error(self.stock.place(next(iter(left))), "reference-cycle", why)

    # Scheduling

    def wire_profiles(self) -> None:
        entries: Sequence[ProfileEntry] = self.document.profiles
        if not entries:
            members = [name for name, plugin in self.stock.plugins.items() if isinstance(plugin, SCHEDULING)]
            entries = [ProfileEntry(DEFAULT_PROFILE, tuple(Ref(name) for name in members))]
        if deciding := [entry for entry in entries if not entry.shadow]:
            self.wire_handler(deciding)
        else:
            why = "all profiles are shadows: none decides"
            self.findings.error(entries[0].place, "only-shadows", why, "remove 'shadow: true' from one of them")
        pickers = self.stock.of_kind(Picker)
        picker = pickers[0] if pickers else self.stock.add(DEFAULT_PICKER)
        for entry in entries:
            self.assembly.profiles.append(self.profile(entry, picker))

    def wire_handler(self, profiles: Sequence[ProfileEntry]) -> None:
        handlers: list[Plugin] = list(self.stock.of_kind(ProfileHandler))
        if not handlers and len(profiles) == 1 and (added := self.stock.add(DEFAULT_HANDLER)):
            handlers = [added]
        if len(handlers) > 1:
            first, second = handlers[0].name, handlers[1].name
            self.findings.error(
                self.stock.entries[second].place,
                "one-handler",
                f"plugins '{first}' and '{second}' are both profile handlers; only one is allowed",
            )
            return
        if not handlers:
            if not self.stock.broken:
                self.findings.error(
                    WHOLE,
                    "no-handler",
                    "no profile handler configured",
                    f"several profiles need one; {DEFAULT_HANDLER} runs one profile",
                )
            return
        (handler,) = handlers
        assert isinstance(handler, ProfileHandler)
        self.assembly.handler = handler
        if why := handler.check([profile.name for profile in profiles]):
            entry = self.stock.entries.get(handler.name)
            self.findings.error(entry.place if entry else profiles[-1].place, "handler-profiles", why)
            return
        for remark in handler.idle([profile.name for profile in profiles]):
            self.findings.warning(self.stock.place(handler.name), "idle-stage", remark)

    def profile(self, entry: ProfileEntry, default: Plugin | None) -> WiredProfile:
        what = f"profile '{entry.name}'"
        members = [(ref, plugin) for ref in entry.members if (plugin := self.member(ref, what))]
        self.note_twice([ref for ref, _ in members], what)
        wired = [(plugin, DEFAULT_WEIGHT if ref.weight is None else ref.weight) for ref, plugin in members]
        pickers = [(ref, plugin) for ref, plugin in members if isinstance(plugin, Picker)]
        for ref, second in pickers[1:]:
            self.findings.error(
                ref.place,
                "one-picker",
                f"{what} has two pickers, '{pickers[0][1].name}' and '{second.name}'; it takes one",
            )
        if not pickers and default is not None and not any(ref.name in self.stock.broken for ref in entry.members):
            wired.append((default, DEFAULT_WEIGHT))
        self.in_profiles.update(plugin.name for plugin, _ in wired)
        return WiredProfile(entry.name, tuple(wired), entry.shadow)

    def member(self, ref: Ref, what: str) -> Plugin | None:
        plugin = self.stock.lookup(ref, what) if ref.place != WHOLE else self.stock.plugins[ref.name]
        if plugin is None or isinstance(plugin, SCHEDULING):
            return plugin
        self.findings.warning(
            ref.place,
            "not-scheduling",
            f"{what}: plugin '{ref.name}' is {kinds_of(plugin)}; only filters, scorers and pickers have a place there",
        )
        return None

    def note_twice(self, refs: Iterable[Ref], what: str) -> None:
        seen: dict[str, Place] = {}
        for ref in refs:
            if ref.name in seen:
                self.findings.warning(
                    ref.place,
                    "ref-twice",
                    f"{what} references plugin '{ref.name}' more than once",
                    f"first in line {seen[ref.name].line}",
                )
            seen.setdefault(ref.name, ref.place)

    # Parsers, saturation, data layer

    def wire_parsers(self) -> None:
        what = "requestHandler.parsers"
        refs = self.document.parsers or [Ref(name) for name in DEFAULT_PARSERS if name in registry.known()]
        self.note_twice(refs, what)
        for ref in refs:
            if ref.name not in self.stock.plugins and ref.name not in self.stock.broken:
                if ref.name in registry.REFERENCE_TYPES and ref.name not in registry.known():
                    self.findings.error(
                        ref.place,
                        "unavailable-type",
                        f"{what}: plugin type '{ref.name}' of llm-d-router is not available in this version",
                    )
                    continue
                self.stock.add(ref.name)
            parser = self.stock.resolve(ref, Parser, what)
            if parser is not None and parser not in self.assembly.parsers:
                self.assembly.parsers.append(parser)

    def wire_saturation(self) -> None:
        """Sheddable requests are measured by it without flow control too."""
        ref = self.document.saturation or Ref(DEFAULT_DETECTOR)
        if ref.name == DEFAULT_DETECTOR and ref.name not in self.stock.entries:
            added = self.stock.add(ref.name)
            self.assembly.saturation = added if isinstance(added, SaturationDetector) else None
            if added is not None and not self.document.gates[FLOW_CONTROL_GATE]:
                self.stock.discard(ref.name)  # nobody has asked for it: what it would read need not be there
            return
        self.assembly.saturation = self.stock.resolve(ref, SaturationDetector, "flowControl.saturationDetector")

    def wire_data_layer(self) -> None:
        for entry in self.document.sources:
            what = f"data source '{entry.source.name}'"
            source = self.stock.resolve(entry.source, DataSource, "dataLayer.sources")
            found = [(ref, self.stock.resolve(ref, Extractor, what)) for ref in entry.extractors]
            extractors = [(ref, extractor) for ref, extractor in found if extractor is not None]
            self.check_extractors(extractors, what)
            if source is not None:
                self.check_source(entry.source, source)
                self.assembly.sources.append(Scraped(source, tuple(e for _, e in extractors)))
        if self.document.inject_defaults and not self.has_default_source():
            self.add_default_source()
        if not self.stock.broken:
            self.check_scraped()
        if self.document.discovery is not None:
            self.assembly.discovery = self.stock.resolve(self.document.discovery, Discovery, "dataLayer.discovery")
        self.check_data_layer()

    def check_data_layer(self) -> None:
        """The supervisor works with our own kinds of these; others may inherit them."""
        scraped = (plugin for each in self.assembly.sources for plugin in (each.source, *each.extractors))
        for plugin in filter(None, (*scraped, self.assembly.discovery)):
            if all(foreign(cls) for cls in type(plugin).__mro__):
                why = f"plugin '{plugin.name}' is {kinds_of(plugin)} of its own kind, which this version has no use for"
                self.findings.error(self.stock.place(plugin.name), "unsupported", why, "inherit one that is there")

    def check_scraped(self) -> None:
        """The supervisor scrapes one data source with one extractor."""
        sources = self.assembly.sources
        entries = self.document.sources
        if not sources and not entries:
            self.findings.error(
                WHOLE,
                "no-source",
                "no data source is configured and dataLayer.injectDefaults is false",
                f"list {DEFAULT_SOURCE} with {DEFAULT_EXTRACTOR}, or remove injectDefaults",
            )
        if len(sources) > 1:
            place = entries[-1].source.place if entries else WHOLE
            names = ", ".join(f"'{scraped.source.name}'" for scraped in sources)
            self.findings.error(
                place, "unsupported", f"this version scrapes one data source, but there are {len(sources)}: {names}"
            )
        for entry in entries:
            if entry.source.name not in self.stock.unresolved and len(entry.extractors) != 1:
                many = len(entry.extractors)
                self.findings.error(
                    entry.source.place,
                    "unsupported",
                    f"data source '{entry.source.name}' has {many or 'no'} extractors; "
                    + ("one is supported" if many else "nothing would be read of its pages"),
                    "" if many else f"add 'extractors: [{{pluginRef: {DEFAULT_EXTRACTOR}}}]'",
                )

    def check_extractors(self, extractors: Sequence[tuple[Ref, Extractor]], what: str) -> None:
        types: set[type[Plugin]] = set()
        taken = {
            extractor.name: scraped.source.name for scraped in self.assembly.sources for extractor in scraped.extractors
        }
        for ref, extractor in extractors:
            if type(extractor) in types:
                self.findings.error(
                    ref.place,
                    "one-extractor",
                    f"{what} has two extractors of type '{self.stock.types[ref.name]}'; it takes one of a type",
                )
            elif ref.name in taken:
                self.findings.error(
                    ref.place,
                    "two-producers",
                    f"extractor '{ref.name}' reads the pages of data source '{taken[ref.name]}' and of {what}",
                    "give each its own",
                )
            types.add(type(extractor))

    def check_source(self, ref: Ref, source: DataSource) -> None:
        if any(scraped.source is source for scraped in self.assembly.sources):
            self.findings.error(
                ref.place,
                "duplicate-name",
                f"dataLayer.sources lists '{ref.name}' twice",
                "put its extractors under one entry",
            )

    def has_default_source(self) -> bool:
        return any(
            entry.source.name == DEFAULT_SOURCE or self.stock.types.get(entry.source.name) == DEFAULT_SOURCE
            for entry in self.document.sources
        )

    def add_default_source(self) -> None:
        """Instances of these names are used as they are."""
        source = self.stock.plugins.get(DEFAULT_SOURCE) or self.stock.add(DEFAULT_SOURCE)
        extractor = self.stock.plugins.get(DEFAULT_EXTRACTOR) or self.stock.add(DEFAULT_EXTRACTOR)
        if isinstance(source, DataSource) and isinstance(extractor, Extractor):
            self.check_extractors(
                [(Ref(extractor.name, self.stock.place(extractor.name)), extractor)],
                f"the default data source '{DEFAULT_SOURCE}'",
            )
            self.assembly.sources.append(Scraped(source, (extractor,)))

    # Who is needed

    def drop_unused(self) -> None:
        """What is referenced nowhere and has no part of its own on the way of a request leaves, with a warning."""
        assembly = self.assembly
        # With an error in the section it is not known whom it uses.
        unplanned = assembly.flow is None and self.document.gates[FLOW_CONTROL_GATE]
        used: set[str] = {
            plugin.name for plugin in (assembly.handler, assembly.discovery, assembly.saturation) if plugin
        }
        used |= {plugin.name for plugin in assembly.parsers} | self.in_profiles | self.named
        used |= {plugin.name for plugin in plugins_of(assembly.flow)}
        used |= {plugin.name for scraped in assembly.sources for plugin in (scraped.source, *scraped.extractors)}
        for name, plugin in list(self.stock.plugins.items()):
            if name in used or isinstance(plugin, DataProducer) or (unplanned and isinstance(plugin, POLICIES)):
                continue
            if isinstance(plugin, SCHEDULING):
                effect = (
                    "chooses nothing, but runs beside requests"
                    if isinstance(plugin, BY_THEMSELVES)
                    else "has no effect"
                )
                self.findings.warning(
                    self.stock.place(name), "unused-plugin", f"plugin '{name}' is in no profile and {effect}"
                )
            elif isinstance(plugin, POLICIES) or not isinstance(plugin, (*BY_THEMSELVES, ProfileHandler)):
                self.findings.warning(
                    self.stock.place(name),
                    "unused-plugin",
                    f"plugin '{name}', {kinds_of(plugin)}, is referenced nowhere and has no effect",
                    _where_named(plugin),
                )
            if isinstance(plugin, POLICIES) or not isinstance(plugin, BY_THEMSELVES):
                del self.stock.plugins[name]

    def wire_data(self) -> None:
        """Producers: those that nobody needs leave, those that are missing come, the rest get their order."""
        plugins = self.stock.plugins
        for idle in contracts.unread(list(plugins.values())):
            self.findings.warning(
                self.stock.place(idle.name),
                "unread-producer",
                f"nothing reads what data producer '{idle.name}' produces; it is left out",
            )
            del plugins[idle.name]
        self.note_unread()
        self.add_producers()
        checked = contracts.check(list(plugins.values()))
        self.assembly.producers, self.assembly.columns = checked.producers, checked.columns
        for name, rule, message, hint in checked.breaches:
            if rule == "no-producer" and not self.assembly.sources and not self.document.inject_defaults:
                hint = hint or "dataLayer.injectDefaults is false"
            self.findings.error(self.stock.place(name), rule, message, hint)

    def check_response_phase(self) -> None:
        """Nobody may need what is switched off."""
        if self.document.response_phase != NONE:
            return
        # The default detector makes do with what servers report.
        plugins = [p for p in self.stock.plugins.values() if type(p).type_name != DEFAULT_DETECTOR]
        needs = response_phase.needs(plugins)
        if self.document.gates[FLOW_CONTROL_GATE]:
            needs.append((FLOW_CONTROL_GATE, "waits for answers to end"))
        if needs:
            who = "; ".join(f"'{name}' {why}" for name, why in needs)
            self.findings.error(
                self.document.response_phase_place,
                "response-phase",
                f"requestHandler.responsePhase is {NONE}, but {who}",
                f"write '{response_phase.FULL}', or remove what needs it",
            )

    def note_unread(self) -> None:
        """Producers that stay for their other parts, though nobody reads their data."""
        plugins = self.stock.plugins.values()
        read = {key.name for plugin in plugins for key in (*plugin.consumes, *plugin.optional)}
        for plugin in plugins:
            if (
                isinstance(plugin, DataProducer)
                and plugin.produces
                and not read & {key.name for key in plugin.produces}
            ):
                self.findings.warning(
                    self.stock.place(plugin.name),
                    "unread-producer",
                    f"nothing reads what data producer '{plugin.name}' produces; it runs for its other parts",
                )

    def add_producers(self) -> None:
        plugins = self.stock.plugins
        for type_name in (*DEFAULT_PRODUCERS, *DEFAULT_PRODUCERS):  # one may need another: twice around
            wanted = contracts.missing(list(plugins.values()))
            if type_name in plugins or not (wanted or type_name == INFLIGHT_LOAD):
                continue
            if type_name == INFLIGHT_LOAD and self.counts_tokens():
                self.stock.add(type_name)
            elif wanted and (producer := self.stock.add(type_name)) and not set(producer.produces) & set(wanted):
                del plugins[type_name]

    def counts_tokens(self) -> bool:
        """Whether tokens in flight are read and nobody counts them."""
        plugins = self.stock.plugins.values()
        read = any(INFLIGHT_TOKENS in plugin.consumes for plugin in plugins)
        return read and not any(type(plugin).type_name == INFLIGHT_LOAD for plugin in plugins)


def _where_named(plugin: Plugin) -> str:
    """A hint for who lists a plugin that is referenced nowhere."""
    if isinstance(plugin, EVICTING):
        return "set flowControl.enableEviction"
    return next((f"name it by {place}" for kind, place in REFERENCES.items() if isinstance(plugin, kind)), "")
