"""Checks how plugins are wired. Each check notes its findings and changes nothing.

`epp.config.assembler` calls the checks while it wires. Contracts about data are in `epp.config.contracts`; warnings about the meaning
of a valid configuration are in `epp.config.lint`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from epp import plugin as points
from epp.config import registry
from epp.config.assembly import SCHEDULING, SELF_ACTING, Assembly, Scraped
from epp.config.defaults import DEFAULT_DETECTOR, DEFAULT_EXTRACTOR, DEFAULT_HANDLER
from epp.config.findings import WHOLE, Findings, Place
from epp.config.flow_assembly import POLICIES
from epp.config.plugin_instances import PluginInstances, kinds_of
from epp.config.written import FLOW_CONTROL_GATE, ProfileEntry, Ref, SourceEntry, WrittenConfig
from epp.decision import response_needs
from epp.metrics.areas import FURTHER_SOURCES_MAX
from epp.plugin import Plugin, foreign

BAND: Final = "flowControl.defaultPriorityBand"
# kind -> the field that refers to plugins of this kind; filters, scorers and pickers are in profiles
REFERENCES: Final[Mapping[type[Plugin], str]] = {
    points.FlowQueue: f"{BAND}.queueRef",
    points.OrderingPolicy: f"{BAND}.orderingPolicyRef",
    points.FairnessPolicy: f"{BAND}.fairnessPolicyRef",
    points.DisplacementPolicy: f"{BAND}.displacementPolicyRef",
    points.UsageLimitPolicy: "flowControl.usageLimitPolicyPluginRef",
    points.SaturationDetector: "flowControl.saturationDetector.pluginRef",
    points.Parser: "requestHandler.parsers",
    points.DataSource: "dataLayer.sources",
    points.Extractor: "dataLayer.sources",
    points.Discovery: "dataLayer.discovery.endpoints.pluginRef",
    points.Syncer: "dataLayer.crossReplica.syncerPluginRef",
}
SOURCES_MAX: Final = 1 + FURTHER_SOURCES_MAX
EVICTING: Final = (points.EvictionFilter, points.EvictionOrder)

# References


def check_reference_cycles(instances: PluginInstances) -> None:
    """Notes an error if plugins refer to each other in a cycle.

    Repeatedly removes the plugins that refer to no remaining plugin. A plugin that cannot be removed is in a cycle, or refers to a cycle.
    """
    left = {name: {need.name for need in plugin.needs.values()} for name, plugin in instances.plugins.items()}
    while free := [name for name, named in left.items() if not named & left.keys()]:
        for name in free:
            del left[name]
    if left:
        names = ", ".join(f"'{name}'" for name in left)
        why = f"plugins refer to each other in a cycle through their parameters: {names}"
        instances.findings.error(instances.place(next(iter(left))), "reference-cycle", why, "remove one of these references")


def warn_of_repeats(refs: Iterable[Ref], what: str, findings: Findings) -> None:
    seen: dict[str, Place] = {}
    for ref in refs:
        if ref.name in seen:
            why = f"{what} references plugin '{ref.name}' more than once"
            findings.warning(ref.place, "ref-twice", why, f"first in line {seen[ref.name].line}; remove one of them")
        seen.setdefault(ref.name, ref.place)


def is_available(ref: Ref, what: str, findings: Findings) -> bool:
    """Notes an error and returns False if only the reference picker has the type that a reference names."""
    if ref.name not in registry.REFERENCE_TYPES or ref.name in registry.names():
        return True
    why = f"{what}: plugin type '{ref.name}' of llm-d-router is not available in this version"
    findings.error(ref.place, "unavailable-type", why, "'epp config plugins' lists the available types")
    return False


# Profiles


def is_one_handler(handlers: Sequence[Plugin], instances: PluginInstances) -> bool:
    """Returns whether the configuration has exactly one profile handler. Notes an error if not."""
    if len(handlers) > 1:
        first, second = handlers[0].name, handlers[1].name
        why = f"plugins '{first}' and '{second}' are both profile handlers; only one is allowed"
        instances.findings.error(instances.entries[second].place, "one-handler", why, "remove one of them")
    elif not handlers and not instances.broken:
        hint = f"several profiles need one in plugins; {DEFAULT_HANDLER} runs only one profile"
        instances.findings.error(WHOLE, "no-handler", "no profile handler is configured", hint)
    return len(handlers) == 1


def check_handler_profiles(handler: points.ProfileHandler, profiles: Sequence[ProfileEntry], instances: PluginInstances) -> None:
    names = [profile.name for profile in profiles]
    if why := handler.check(names):
        entry = instances.entries.get(handler.name)
        instances.findings.error(entry.place if entry else profiles[-1].place, "handler-profiles", why)
        return
    for remark in handler.idle(names):
        instances.findings.warning(instances.place(handler.name), "idle-stage", remark)


def check_one_picker(pickers: Sequence[tuple[Ref, Plugin]], what: str, findings: Findings) -> None:
    for ref, second in pickers[1:]:
        why = f"{what} has two pickers, '{pickers[0][1].name}' and '{second.name}'; a profile takes one"
        findings.error(ref.place, "one-picker", why, "remove one of them")


def warn_not_scheduling(plugin: Plugin, ref: Ref, what: str, findings: Findings) -> None:
    why = f"{what}: plugin '{ref.name}' is {kinds_of(plugin)}; only filters, scorers and pickers belong in a profile"
    findings.warning(ref.place, "not-scheduling", why, "remove it")


# Data layer


def check_data_layer_kinds(assembly: Assembly, instances: PluginInstances) -> None:
    """Refuses sources, extractors and discovery plugins that inherit from no built-in class: the supervisor cannot use them."""
    scraped = (plugin for each in assembly.sources for plugin in (each.source, *each.extractors))
    for plugin in filter(None, (*scraped, assembly.discovery)):
        if all(foreign(cls) for cls in type(plugin).__mro__):
            why = f"plugin '{plugin.name}' is {kinds_of(plugin)} that inherits from no built-in class; this version cannot use it"
            instances.findings.error(instances.place(plugin.name), "unsupported", why, "inherit from a built-in class of this kind")


def check_source_count(written: WrittenConfig, assembly: Assembly, instances: PluginInstances) -> None:
    """Checks that each data source has one extractor, which can read its pages, and that there are not too many sources."""
    if len(assembly.sources) > SOURCES_MAX:
        why = f"{len(assembly.sources)} data sources are configured; at most {SOURCES_MAX} are scraped"
        instances.findings.error(written.sources[-1].source.place, "unsupported", why, "remove some of them")
    scraped = {each.source.name: each for each in assembly.sources}
    for entry in written.sources:
        if entry.source.name not in instances.unresolved and not scrapes_nothing(instances, entry.source.name):
            _check_one_extractor(entry, instances.findings)
            if (each := scraped.get(entry.source.name)) is not None:
                _check_pages(entry, each, instances.findings)


def _check_pages(entry: SourceEntry, scraped: Scraped, findings: Findings) -> None:
    brought = getattr(scraped.source, "pages", None)
    for ref, extractor in zip(entry.extractors, scraped.extractors, strict=False):
        if not extractor.reads_pages:
            why = f"extractor '{extractor.name}' reads no pages, so it belongs to no data source"
            findings.error(ref.place, "wrong-kind", why, "remove it here; it is used where plugins name it")
        elif brought is not None and (read := getattr(extractor, "pages", brought)) != brought:
            why = f"extractor '{extractor.name}' reads pages of {read}, but '{entry.source.name}' brings pages of {brought}"
            findings.error(ref.place, "wrong-kind", why, "pair sources and extractors of one kind")


def scrapes_nothing(instances: PluginInstances, name: str) -> bool:
    """Returns whether this data source fetches nothing: it tells plugins about endpoints, or observes answers."""
    source = instances.plugins.get(name)
    return isinstance(source, points.DataSource) and not source.scrapes


def check_no_extractors(entry: SourceEntry, source: points.DataSource, findings: Findings) -> None:
    """Notes an error for each extractor of a source that takes no extractors."""
    if entry.extractors and not source.takes_extractors:
        why = f"data source '{source.name}' takes no extractors"
        findings.error(entry.extractors[0].place, "wrong-kind", why, "remove them")


def _check_one_extractor(entry: SourceEntry, findings: Findings) -> None:
    count = len(entry.extractors)
    if count == 1:
        return
    rest = "one is supported" if count else "its pages would not be read"
    why = f"data source '{entry.source.name}' has {count or 'no'} extractors; {rest}"
    hint = "keep one of them" if count else f"add 'extractors: [{{pluginRef: {DEFAULT_EXTRACTOR}}}]'"
    findings.error(entry.source.place, "unsupported", why, hint)


def check_extractors(extractors: Sequence[tuple[Ref, points.Extractor]], what: str, assembly: Assembly, findings: Findings) -> None:
    """Checks the extractors of one source: no two may have the same type, and an earlier source may not have the same extractor.

    `what`: the source's name in findings. Call this function before the source is added to `assembly.sources`.
    """
    types: set[type[Plugin]] = set()
    taken = {extractor.name: scraped.source.name for scraped in assembly.sources for extractor in scraped.extractors}
    for ref, extractor in extractors:
        if type(extractor) in types:
            why = f"{what} has two extractors of type '{assembly.types[ref.name]}'; it takes one of each type"
            findings.error(ref.place, "one-extractor", why, "remove one of them")
        elif ref.name in taken:
            why = f"extractor '{ref.name}' reads the pages of data source '{taken[ref.name]}' and of {what}"
            findings.error(ref.place, "two-producers", why, "give each source its own extractor")
        types.add(type(extractor))


def check_source_once(ref: Ref, source: points.DataSource, assembly: Assembly, findings: Findings) -> None:
    if any(scraped.source is source for scraped in assembly.sources):
        why = f"dataLayer.sources lists '{ref.name}' twice"
        findings.error(ref.place, "duplicate-name", why, "put its extractors under one entry")


# Unused plugins and data producers


def warn_unused(plugin: Plugin, instances: PluginInstances) -> None:
    """Warns of a plugin that no field refers to. Hooks and other plugins that run by themselves need no reference."""
    place = instances.place(plugin.name)
    if isinstance(plugin, SCHEDULING):
        runs = isinstance(plugin, SELF_ACTING)
        effect = "does not take part in decisions; its other extension points run" if runs else "has no effect"
        instances.findings.warning(place, "unused-plugin", f"plugin '{plugin.name}' is in no profile and {effect}")
    elif isinstance(plugin, POLICIES) or not isinstance(plugin, (*SELF_ACTING, points.ProfileHandler)):
        why = f"plugin '{plugin.name}', {kinds_of(plugin)}, is not referenced and has no effect"
        instances.findings.warning(place, "unused-plugin", why, _where_named(plugin))


def _where_named(plugin: Plugin) -> str:
    """Returns a hint that names the field in which the configuration could refer to the plugin."""
    if isinstance(plugin, EVICTING):
        return "set flowControl.enableEviction"
    return next((f"name it in {field}" for kind, field in REFERENCES.items() if isinstance(plugin, kind)), "")


def warn_left_out(plugin: Plugin, instances: PluginInstances) -> None:
    why = f"no plugin reads the data of data producer '{plugin.name}'; it is dropped"
    instances.findings.warning(instances.place(plugin.name), "unread-producer", why)


def warn_unread(instances: PluginInstances) -> None:
    """Warns of data producers whose data no plugin reads. They stay in use, because they have other extension points."""
    plugins = instances.plugins.values()
    read = {key.name for plugin in plugins for key in (*plugin.consumes, *plugin.optional)}
    for plugin in plugins:
        if isinstance(plugin, points.DataProducer) and plugin.produces and not read & {key.name for key in plugin.produces}:
            why = f"no plugin reads the data of data producer '{plugin.name}'; it runs for its other extension points"
            instances.findings.warning(instances.place(plugin.name), "unread-producer", why)


def check_response_phase(written: WrittenConfig, instances: PluginInstances) -> None:
    """Checks that no plugin needs the response phase if it is switched off."""
    if written.response_phase != response_needs.NONE:
        return
    # The default detector does not need the response phase: the values that servers report are enough.
    plugins = [plugin for plugin in instances.plugins.values() if type(plugin).type_name != DEFAULT_DETECTOR]
    needs = response_needs.needs(plugins)
    if written.gates[FLOW_CONTROL_GATE]:
        needs.append((FLOW_CONTROL_GATE, "waits for answers to end"))
    if needs:
        names = "; ".join(f"'{name}' {why}" for name, why in needs)
        why = f"requestHandler.responsePhase is {response_needs.NONE}, but {names}"
        hint = f"write '{response_needs.FULL}', or remove what needs answers"
        instances.findings.error(written.response_phase_place, "response-phase", why, hint)
