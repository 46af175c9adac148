"""Assembles a `WrittenConfig` into an `Assembly`: adds defaults, resolves references and orders data producers.

The order of the steps is that of the reference picker: profiles, profile handler, pickers, parsers,
saturation detector, data layer, data producers. The assembler continues after an error, so that one
run shows all errors. The assembler reads no text and compiles nothing.
"""

from collections.abc import Sequence

from epp import plugin as points
from epp.config import contracts, registry, wiring_checks
from epp.config.assembly import SCHEDULING, SELF_ACTING, Assembly, Scraped
from epp.config.defaults import (
    DEFAULT_DETECTOR,
    DEFAULT_EXTRACTOR,
    DEFAULT_HANDLER,
    DEFAULT_PARSERS,
    DEFAULT_PICKER,
    DEFAULT_PRODUCERS,
    DEFAULT_PROFILE,
    DEFAULT_SOURCE,
    DEFAULT_WEIGHT,
)
from epp.config.findings import WHOLE, Findings
from epp.config.flow_assembly import POLICIES, plan, plugins_of
from epp.config.plugin_instances import PluginInstances
from epp.config.written import FLOW_CONTROL_GATE, ProfileEntry, Ref, WrittenConfig
from epp.data import COUNTED, INFLIGHT_TOKENS, Column
from epp.decision.pipeline import WiredProfile
from epp.plugin import Plugin
from epp.points.parameters import INFLIGHT_LOAD
from epp.prefix.match import assign_tiers


def assemble(written: WrittenConfig, findings: Findings, *, allow_experimental: bool) -> Assembly:
    """Wires the plugins of a configuration and the defaults that they need."""
    instances = PluginInstances(written.plugins, findings, allow_experimental=allow_experimental, unread=written.unread)
    return _Assembler(written, findings, instances).assemble()


class _Assembler:
    """Builds one assembly. Each method `wire_…` adds one part of the configuration."""

    def __init__(self, written: WrittenConfig, findings: Findings, instances: PluginInstances) -> None:
        self.written = written
        self.findings = findings
        self.instances = instances
        self.assembly = Assembly(instances.plugins, instances.types)
        self.in_profiles: set[str] = set()
        self.in_parameters: set[str] = set()  # names of plugins that the parameters of other plugins refer to

    def assemble(self) -> Assembly:
        self.instances.make()
        self.wire_references()
        self.wire_profiles()
        self.wire_parsers()
        self.wire_saturation()
        self.assembly.flow = plan(self.written, self.instances, self.assembly.saturation)
        self.wire_data_layer()
        self.drop_unused()
        # After an error in a plugin or a reference, these checks would report the same error again.
        if not (self.instances.broken or self.instances.unresolved):
            self.wire_data()
            wiring_checks.check_response_phase(self.written, self.instances)
        return self.assembly

    # References between plugins

    def wire_references(self) -> None:
        listed = self.instances.listed
        for plugin in listed:
            self.instances.call_foreign(plugin, plugin.meet, listed)
        for plugin in listed:
            resolved = {}
            for key, need in plugin.needs.items():
                place = self.instances.place_of(plugin.name, need.parameter)
                what = f"parameters.{need.parameter} of plugin '{plugin.name}'"
                if (named := self.instances.resolve(Ref(need.name, place), need.kind, what)) is not None:
                    resolved[key] = named
                    self.in_parameters.add(named.name)
            if len(resolved) == len(plugin.needs):
                self.instances.call_foreign(plugin, plugin.resolve, resolved)
        wiring_checks.check_reference_cycles(self.instances)

    # Scheduling

    def wire_profiles(self) -> None:
        entries: Sequence[ProfileEntry] = self.written.profiles
        if not entries:
            members = [name for name, plugin in self.instances.plugins.items() if isinstance(plugin, SCHEDULING)]
            entries = [ProfileEntry(DEFAULT_PROFILE, tuple(Ref(name) for name in members))]
        if deciding := [entry for entry in entries if not entry.shadow]:
            self.wire_handler(deciding)
        else:
            why = "all profiles are shadows, so none can decide"
            self.findings.error(entries[0].place, "only-shadows", why, "remove 'shadow: true' from one of them")
        pickers = self.instances.of_kind(points.Picker)
        picker = pickers[0] if pickers else self.instances.add(DEFAULT_PICKER)
        for entry in entries:
            self.assembly.profiles.append(self.profile(entry, picker))

    def wire_handler(self, profiles: Sequence[ProfileEntry]) -> None:
        handlers: list[Plugin] = list(self.instances.of_kind(points.ProfileHandler))
        if not handlers and len(profiles) == 1 and (added := self.instances.add(DEFAULT_HANDLER)):
            handlers = [added]
        if not wiring_checks.is_one_handler(handlers, self.instances):
            return
        (handler,) = handlers
        assert isinstance(handler, points.ProfileHandler)
        self.assembly.handler = handler
        wiring_checks.check_handler_profiles(handler, profiles, self.instances)

    def profile(self, entry: ProfileEntry, default: Plugin | None) -> WiredProfile:
        what = f"profile '{entry.name}'"
        members = [(ref, plugin) for ref in entry.members if (plugin := self.member(ref, what))]
        wiring_checks.warn_of_repeats([ref for ref, _ in members], what, self.findings)
        wired = [(plugin, DEFAULT_WEIGHT if ref.weight is None else ref.weight) for ref, plugin in members]
        pickers = [(ref, plugin) for ref, plugin in members if isinstance(plugin, points.Picker)]
        wiring_checks.check_one_picker(pickers, what, self.findings)
        # If a member could not be made, it may have been a picker.
        unknown = any(ref.name in self.instances.broken for ref in entry.members)
        if not pickers and default is not None and not unknown:
            wired.append((default, DEFAULT_WEIGHT))
        self.in_profiles.update(plugin.name for plugin, _ in wired)
        return WiredProfile(entry.name, tuple(wired), entry.shadow)

    def member(self, ref: Ref, what: str) -> Plugin | None:
        plugin = self.instances.lookup(ref, what) if ref.place != WHOLE else self.instances.plugins[ref.name]
        if plugin is None or isinstance(plugin, SCHEDULING):
            return plugin
        wiring_checks.warn_not_scheduling(plugin, ref, what, self.findings)
        return None

    # Parsers, saturation

    def wire_parsers(self) -> None:
        what = "requestHandler.parsers"
        refs = self.written.parsers or [Ref(name) for name in DEFAULT_PARSERS if name in registry.names()]
        wiring_checks.warn_of_repeats(refs, what, self.findings)
        for ref in refs:
            if ref.name not in self.instances.plugins and ref.name not in self.instances.broken:
                if not wiring_checks.is_available(ref, what, self.findings):
                    continue
                self.instances.add(ref.name)
            parser = self.instances.resolve(ref, points.Parser, what)
            if parser is not None and parser not in self.assembly.parsers:
                self.assembly.parsers.append(parser)

    def wire_saturation(self) -> None:
        """Wires the saturation detector, even without flow control: the detector also decides whether a sheddable request is refused."""
        ref = self.written.saturation or Ref(DEFAULT_DETECTOR)
        if ref.name == DEFAULT_DETECTOR and ref.name not in self.instances.entries:
            added = self.instances.add(ref.name)
            self.assembly.saturation = added if isinstance(added, points.SaturationDetector) else None
            if added is not None and not self.written.gates[FLOW_CONTROL_GATE]:
                # The default was not listed, so the data that it reads need not be produced.
                self.instances.discard(ref.name)
            return
        self.assembly.saturation = self.instances.resolve(ref, points.SaturationDetector, "flowControl.saturationDetector")

    # Data layer

    def wire_data_layer(self) -> None:
        assembly = self.assembly
        for entry in self.written.sources:
            what = f"data source '{entry.source.name}'"
            source = self.instances.resolve(entry.source, points.DataSource, "dataLayer.sources")
            if source is not None and wiring_checks.scrapes_nothing(self.instances, source.name):
                wiring_checks.check_no_extractors(entry, source, self.findings)
                told = [self.instances.resolve(ref, Plugin, what) for ref in entry.extractors]
                self.in_parameters.update((source.name, *(plugin.name for plugin in told if plugin is not None)))
                continue
            resolved = [(ref, self.instances.resolve(ref, points.Extractor, what)) for ref in entry.extractors]
            extractors = [(ref, extractor) for ref, extractor in resolved if extractor is not None]
            wiring_checks.check_extractors(extractors, what, assembly, self.findings)
            if source is not None:
                wiring_checks.check_source_once(entry.source, source, assembly, self.findings)
                assembly.sources.append(Scraped(source, tuple(extractor for _, extractor in extractors)))
        if self.written.inject_defaults and not self.has_default_source() and not self.replaces_default_source():
            self.add_default_source()
        if not self.instances.broken:
            wiring_checks.check_source_count(self.written, assembly, self.instances)
        if self.written.discovery is not None:
            assembly.discovery = self.instances.resolve(self.written.discovery, points.Discovery, "dataLayer.discovery.endpoints")
        if (ref := self.written.syncer) is not None:
            what = "dataLayer.crossReplica.syncerPluginRef"
            if (syncer := self.instances.resolve(ref, points.Syncer, what)) is not None:
                self.in_parameters.add(syncer.name)
                why = f"{what} has no effect: replicas of this picker share state through --replica-store"
                self.findings.warning(ref.place, "no-effect", why, "see docs/kubernetes.md for what replicas do")
        wiring_checks.check_data_layer_kinds(assembly, self.instances)

    def has_default_source(self) -> bool:
        names = [entry.source.name for entry in self.written.sources]
        return any(DEFAULT_SOURCE in (name, self.instances.types.get(name)) for name in names)

    def replaces_default_source(self) -> bool:
        """Returns whether a listed data source replaces the default one. `add_missed_source` may add the default one again."""
        listed = [self.instances.plugins.get(entry.source.name) for entry in self.written.sources]
        return any(getattr(source, "replaces_default", False) for source in listed)

    def add_missed_source(self) -> None:
        """Adds the omitted default source if a plugin reads a column that no listed extractor produces."""
        plugins = self.instances.plugins.values()
        if not (self.written.inject_defaults and self.replaces_default_source()) or self.has_default_source():
            return
        produced = {key.name for plugin in plugins if isinstance(plugin, points.Extractor) for key in plugin.produces}
        read = {key.name for plugin in plugins for key in plugin.consumes if isinstance(key, Column)}
        if read - produced - COUNTED:
            self.add_default_source()

    def add_default_source(self) -> None:
        """Adds the default source and extractor. If the configuration lists instances with these names, uses those instances."""
        source = self.instances.plugins.get(DEFAULT_SOURCE) or self.instances.add(DEFAULT_SOURCE)
        extractor = self.instances.plugins.get(DEFAULT_EXTRACTOR) or self.instances.add(DEFAULT_EXTRACTOR)
        if isinstance(source, points.DataSource) and isinstance(extractor, points.Extractor):
            named = (Ref(extractor.name, self.instances.place(extractor.name)), extractor)
            what = f"the default data source '{DEFAULT_SOURCE}'"
            wiring_checks.check_extractors([named], what, self.assembly, self.findings)
            self.assembly.sources.append(Scraped(source, (extractor,)))

    # Unused plugins and data producers

    def drop_unused(self) -> None:
        """Warns of plugins to which nothing refers, and drops those that run only if something refers to them.

        After an error, this method does not warn, because the reader may have skipped the part of the configuration that uses the plugin.
        """
        used = self.used()
        # After an error in the section flowControl, it is unknown which policies that section uses.
        unplanned = self.assembly.flow is None and self.written.gates[FLOW_CONTROL_GATE]
        for name, plugin in list(self.instances.plugins.items()):
            if name in used or isinstance(plugin, points.DataProducer) or (unplanned and isinstance(plugin, POLICIES)):
                continue
            if not self.findings.errors:
                wiring_checks.warn_unused(plugin, self.instances)
            if isinstance(plugin, POLICIES) or not isinstance(plugin, SELF_ACTING):
                del self.instances.plugins[name]

    def used(self) -> set[str]:
        """Returns the names of all plugins to which something refers, and of the extractors that need no reference."""
        assembly = self.assembly
        single = (assembly.handler, assembly.discovery, assembly.saturation)
        scraped = (plugin for each in assembly.sources for plugin in (each.source, *each.extractors))
        plugins = (*filter(None, single), *assembly.parsers, *plugins_of(assembly.flow), *scraped)
        unbound = {name for name, each in self.instances.plugins.items() if isinstance(each, points.Extractor) and not each.reads_pages}
        return {plugin.name for plugin in plugins} | self.in_profiles | self.in_parameters | unbound

    def wire_data(self) -> None:
        """Drops producers whose data no plugin reads, adds default producers for missing data, and orders all producers."""
        plugins = self.instances.plugins
        for idle in contracts.unread(list(plugins.values())):
            wiring_checks.warn_left_out(idle, self.instances)
            del plugins[idle.name]
        wiring_checks.warn_unread(self.instances)
        self.add_producers()
        assign_tiers(plugins.values())
        self.add_missed_source()
        checked = contracts.check(list(plugins.values()))
        self.assembly.producers, self.assembly.columns = checked.producers, checked.columns
        for name, rule, message, hint in checked.breaches:
            if rule == "no-producer" and not self.assembly.sources and not self.written.inject_defaults:
                hint = hint or "dataLayer.injectDefaults is false: remove it, or list a data source"
            self.findings.error(self.instances.place(name), rule, message, hint)

    def add_producers(self) -> None:
        plugins = self.instances.plugins
        # Twice: a default producer may itself need another default producer.
        for type_name in (*DEFAULT_PRODUCERS, *DEFAULT_PRODUCERS):
            wanted = contracts.missing(list(plugins.values()))
            if type_name in plugins or not (wanted or type_name == INFLIGHT_LOAD):
                continue
            if type_name == INFLIGHT_LOAD and self.lacks_token_counts():
                self.instances.add(type_name)
            elif wanted and (producer := self.instances.add(type_name, experimental=True)) and not set(producer.produces) & set(wanted):
                del plugins[type_name]

    def lacks_token_counts(self) -> bool:
        """Returns whether a plugin reads the tokens in flight but no plugin counts them."""
        plugins = self.instances.plugins.values()
        read = any(INFLIGHT_TOKENS in plugin.consumes for plugin in plugins)
        return read and not any(type(plugin).type_name == INFLIGHT_LOAD for plugin in plugins)
