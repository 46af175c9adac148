"""The registry of plugin types: finds classes by name and makes instances of them.

Built-in plugins are found by walking `epp/plugins`. The walk searches the sources for `@plugin("type", ...)` and imports nothing. `find`
imports only the module that has the type, because importing all modules takes 5 MiB of memory, and 13 MiB with the libraries that some of
them need. `known` imports all of these modules.

Other plugins come from the entry-point group ENTRY_POINTS of installed distributions, from the files of a folder (`add_sources`), or from
`type: package.module:Class` in a configuration. If one of these modules cannot be imported, the start fails, so a picker never runs with a
part of its plugins. The registry never gives a name to a second class, whether the first one is built in or was registered later.

REFERENCE_TYPES are the names that the reference picker (llm-d-router) knows. If a configuration names one of these types and this version
lacks it, the error says so, because the name is not misspelt.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import itertools
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import epp.plugins
from epp.config import extension
from epp.config.findings import similar
from epp.config.plugin_class import fault, keys_fault
from epp.plugin import EXTENSION_POINTS, Plugin, foreign, plugin
from epp.points.base import BUILT_IN, OWN_PACKAGE, REGISTERED

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "epp.plugins"
# Private, so that the module names of a folder's files cannot clash with other modules.
FOLDER_PACKAGE = "epp_plugin_path"
_packages = itertools.count()

_DECORATOR = re.compile(r"^@plugin\((.*)\)$", re.MULTILINE)
_LITERALS = re.compile(r'"[^"\\]*"(?:, "[^"\\]*")*')
_BY_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

_STABLE = """
    active-request-scorer always-disagg-multimodal-decider always-disagg-pd-decider anthropic-parser
    approx-prefix-cache-producer by-label by-label-selector concurrency-detector context-length-aware
    core-metrics-extractor data-parallel-profile-handler decode-filter destination-endpoint-served-verifier
    disagg-headers-handler disagg-profile-handler edf-ordering-policy encode-filter endpoint-notification-source
    fcfs-ordering-policy file-discovery global-strict-fairness-policy header-based-testing-filter
    inflight-load-producer k8s-notification-source kv-cache-utilization-scorer label-selector-filter
    latency-scorer latency-slo-admitter load-aware-scorer lora-affinity-scorer max-score-picker
    metrics-data-source mm-embeddings-cache-producer mm-embeddings-cache-scorer models-data-extractor
    models-data-source no-hit-lru-scorer openai-parser passthrough-parser pd-profile-handler
    precise-prefix-cache-producer precise-prefix-cache-scorer predicted-latency-producer prefill-filter
    prefill-header-handler prefix-based-pd-decider prefix-cache-affinity-filter prefix-cache-scorer redis-state-store redis-syncer
    probabilistic-admitter program-aware-fairness queue-scorer random-picker request-attribute-reporter
    round-robin-fairness-policy running-requests-size-scorer session-id-producer sglanghttp-parser
    single-profile-handler slo-deadline-ordering-policy slo-headroom-tier-filter static-usage-limit-policy
    token-load-scorer token-producer tokenizer utilization-detector vertexai-parser vllmgrpc-parser
    vllmhttp-parser weighted-random-picker
"""
STABLE_TYPES = frozenset(_STABLE.split())
_EXPERIMENTAL = """
    agent-identity burst-prefix-cache-producer dcgm-data-source dcgm-extractor disaggregatedset-rollout-screener
    endpoint-attribute-filter endpoint-attribute-scorer header-label-affinity-scorer header-profile-handler
    latency-observation-scorer latency-observation-scorer-hub latency-observer-producer latency-observer-producer-hub
    max-saturation-detector
    multicluster-approx-prefix-cache-producer multicluster-file-discovery
    multicluster-kv-cache-utilization-scorer multicluster-metrics-data-source multicluster-metrics-extractor
    multicluster-prefix-cache-scorer multicluster-queue-scorer multicluster-session-affinity-filter
    p2p-source-producer priority-holdback-policy priority-then-time-eviction-order-policy
    session-affinity-filter session-affinity-scorer sheddable-eviction-filter soft-reflective-ceiling-policy
    thunder-agent topology-affinity-filter topology-affinity-scorer topology-extractor utilization-filter
"""
EXPERIMENTAL_TYPES = frozenset(_EXPERIMENTAL.split())
REFERENCE_TYPES = STABLE_TYPES | EXPERIMENTAL_TYPES
DEPRECATED_TYPES: Mapping[str, str] = {  # deprecated type -> what to use instead
    "by-label": "label-selector-filter",
    "by-label-selector": "label-selector-filter",
    "disagg-headers-handler": "disagg-profile-handler",
    "pd-profile-handler": "disagg-profile-handler",
    "precise-prefix-cache-scorer": "precise-prefix-cache-producer with prefix-cache-scorer",
    "prefill-header-handler": "disagg-profile-handler",
    "tokenizer": "token-producer",
}


class PluginImportError(Exception):
    """Raised if a plugin module cannot be imported. The fault is in the installation, not in a configuration."""


class UnknownType(Exception):
    """Raised if a `type` names no usable class. `rule` and `hint` are for the error that the user sees."""

    def __init__(self, rule: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.rule = rule
        self.hint = hint


@functools.cache
def known() -> Mapping[str, type[Plugin]]:
    """Returns all types by name and alias; imports the modules of all built-in types. Raises PluginImportError."""
    for module, _file in sorted(_own_modules()):
        _load(module)
    _import_installed()
    return REGISTERED


def names() -> set[str]:
    """Returns the names and aliases of all types. Imports only plugins that are not built in. Raises PluginImportError."""
    _import_installed()
    return REGISTERED.keys() | BUILT_IN.keys()


@functools.cache
def _import_installed() -> None:
    """Imports the plugins of entry points. The names of built-in types are reserved first, so that no other class can take them."""
    _read_built_in()
    for entry in sorted(_entry_points(), key=lambda entry: (entry.name, entry.value)):
        where = f"entry point '{entry.name}' ({entry.value}) of group {ENTRY_POINTS}"
        before = set(REGISTERED)
        try:
            loaded = entry.load()
            if isinstance(loaded, type) and issubclass(loaded, Plugin) and not loaded.type_name:
                plugin(entry.name)(loaded)
        except (Exception, SystemExit) as error:  # foreign code may raise anything; any exception stops the start
            raise PluginImportError(f"{where} cannot be imported: {_error_text(error)}") from error
        brought = [REGISTERED[name] for name in REGISTERED if name not in before]
        if not (brought or isinstance(loaded, types.ModuleType)):
            brought = [loaded]  # the class was registered by an earlier import, or it is not a plugin class
        for cls in brought:
            if wrong := fault(cls):
                raise PluginImportError(f"{where}: class {getattr(cls, '__name__', cls)} {wrong}")


def _entry_points() -> Iterable["EntryPoint"]:
    """Returns the entry points of plugins. Usually there are none, and `importlib.metadata` (2 MiB of memory) is not imported."""
    if not any(map(_may_have_plugins, sys.path)):
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINTS)


def _may_have_plugins(place: str) -> bool:
    """Returns whether a distribution in a folder of `sys.path` names the group. True also for an archive, which cannot be searched."""
    folder = Path(place or ".")
    if not folder.is_dir():
        return folder.exists()
    return any(ENTRY_POINTS in file.read_text(errors="replace") for file in folder.glob("*-info/entry_points.txt"))


def _read_built_in() -> None:
    """Fills BUILT_IN from the source text of `epp/plugins`. Imports a module only if the arguments of its `@plugin` are not plain texts."""
    BUILT_IN.clear()
    for module, file in sorted(_own_modules()):
        with open(file, encoding="utf-8") as source:
            for arguments in _DECORATOR.findall(source.read()):
                if _LITERALS.fullmatch(arguments):
                    BUILT_IN.update(dict.fromkeys(re.findall(r'"(.*?)"', arguments), module))
                else:
                    _load(module)


def _own_modules() -> Iterator[tuple[str, str]]:
    """Yields the modules below `epp/plugins` and their files."""
    packages = [(OWN_PACKAGE, list(epp.plugins.__path__))]
    for prefix, folders in packages:
        for found in pkgutil.iter_modules(folders, prefix):
            path = f"{found.module_finder.path}/{found.name.rpartition('.')[2]}"  # type: ignore[union-attr]  # of files
            yield found.name, f"{path}/__init__.py" if found.ispkg else f"{path}.py"
            if found.ispkg:
                packages.append((f"{found.name}.", [path]))


def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a module may raise anything; any exception stops the start
        raise PluginImportError(f"plugin module {module} cannot be imported: {_error_text(error)}") from error


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class _FromSource(importlib.abc.SourceLoader):
    """Loads one module from text. The loader reads and writes no files."""

    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return self._source

    def get_code(self, fullname: str) -> types.CodeType | None:
        return self.source_to_code(self._source, self._path)


class _FolderFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of one folder's package, so that its files can import each other by `from . import ...`."""

    def __init__(self, package: str, folder: str, sources: Mapping[str, bytes]) -> None:
        self.package = package
        self._folder = folder
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        source = self._sources.get(f"{name}.py") if parent == self.package else None
        if source is None:
            return None
        path = f"{self._folder.rstrip('/')}/{name}.py"
        spec = importlib.machinery.ModuleSpec(fullname, _FromSource(path, source), origin=path)
        spec.has_location = True
        return spec


def add_sources(folder: str, sources: Mapping[str, bytes]) -> list[str]:
    """Imports the Python files of a folder, in sorted order, into a private package. Returns the types that they register.

    `sources`: the bytes of each file by its name. Only the other files import files with a leading `_` in their names. Raises
    PluginImportError with file and cause.
    """
    _import_installed()  # installed plugins come first, so that a file cannot take the name of one of their types
    package = f"{FOLDER_PACKAGE}_{next(_packages)}"
    sys.modules[package] = module = types.ModuleType(package)
    module.__path__ = [folder]
    sys.meta_path.insert(0, _FolderFinder(package, folder, sources))
    registered: list[str] = []
    for file in sorted(sources):
        name = file.removesuffix(".py")
        if not name.startswith("_"):
            registered += _from_file(f"{package}.{name}", f"{folder.rstrip('/')}/{file}")
    if not registered:
        raise PluginImportError(f"plugin folder {folder} has no Python file that registers a plugin type")
    return registered


def replace_sources(folder: str, sources: Mapping[str, bytes]) -> None:
    """Removes the types that earlier folders have registered, and adds the types of `sources`. Instances in use keep their classes.

    Raises PluginImportError; then the earlier types stay registered.
    """
    before, finders = dict(REGISTERED), list(sys.meta_path)
    modules = {name: module for name, module in sys.modules.items() if name.startswith(FOLDER_PACKAGE)}
    for name, cls in before.items():
        if cls.__module__.startswith(FOLDER_PACKAGE):
            del REGISTERED[name]
    sys.meta_path[:] = [finder for finder in finders if not isinstance(finder, _FolderFinder)]
    try:
        if sources:
            add_sources(folder, sources)
    except PluginImportError:
        REGISTERED.clear()
        REGISTERED.update(before)
        sys.meta_path[:] = finders
        raise
    for name in modules:
        sys.modules.pop(name, None)


def _from_file(module: str, file: str) -> list[str]:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # foreign code may raise anything; any exception stops the start
        walked = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in walked if frame.f_globals.get("__name__") == module]
        where = f"{file}:{lines[-1]}" if lines else file
        raise PluginImportError(f"plugin file {where} cannot be imported: {_error_text(error)}") from error
    registered = [name for name, cls in REGISTERED.items() if cls.__module__ == module]
    for name in registered:
        if wrong := fault(REGISTERED[name]):
            raise PluginImportError(f"plugin file {file}: type '{name}': class {REGISTERED[name].__name__} {wrong}")
    if not registered:
        raise PluginImportError(
            f"plugin file {file} registers no plugin type; decorate a class with @plugin(...), or start the file's name with _"
        )
    return registered


def find(type_name: str) -> type[Plugin]:
    """Returns the class of a configured type. Raises UnknownType."""
    _import_installed()
    if type_name not in REGISTERED and type_name in BUILT_IN:
        _load(BUILT_IN[type_name])
    if type_name in REGISTERED:
        return REGISTERED[type_name]
    if ":" in type_name:
        return _by_path(type_name)
    if type_name in REFERENCE_TYPES:
        raise UnknownType(
            "unavailable-type",
            f"plugin type '{type_name}' of llm-d-router is not available in this version",
            "'epp config plugins' lists the available types",
        )
    raise UnknownType(
        "unknown-type",
        f"plugin type '{type_name[:128]}' is not registered",
        extension.instead(type_name) or suggestion(type_name) or "'epp config plugins' lists the available types",
    )


def suggestion(type_name: str) -> str:
    """Returns a hint for an unknown type: the most similar type or, if the type is deprecated, what replaces it."""
    close = similar(type_name, names())
    return f"did you mean '{DEPRECATED_TYPES.get(close[0], close[0])}'?" if close else ""


def _by_path(path: str) -> type[Plugin]:
    if not _BY_PATH.fullmatch(path):
        raise UnknownType("unknown-type", f"plugin type '{path[:128]}' is not of the form package.module:Class")
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # foreign code may raise anything; that is an error of the configuration that names the type
        raise UnknownType("plugin-import", f"plugin type '{path}': module {module} cannot be imported: {_error_text(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, Plugin) and kinds(cls)):
        raise UnknownType(
            "unknown-type",
            f"plugin type '{path}': {module} has no plugin class '{name}'",
            "a plugin class inherits from an extension point of epp.plugin",
        )
    if wrong := fault(cls):
        raise UnknownType("plugin-class", f"plugin type '{path}': the class {wrong}")
    return cls


def kinds(cls: type[Plugin]) -> tuple[type[Plugin], ...]:
    """Returns the extension points of a class, in the order in which they run."""
    return tuple(point for point in EXTENSION_POINTS if issubclass(cls, point))


def made(name: str, cls: type[Plugin], params: msgspec.Struct) -> Plugin:
    """Makes a plugin. Raises ValueError; its text begins with the path of the wrong parameter if the constructor names it."""
    try:
        instance = cls(name, params)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # a foreign constructor may raise anything
        raise ValueError(_error_text(error)) from error
    if wrong := _instance_fault(instance):
        raise ValueError(f"class {cls.__name__} {wrong}")
    return instance


def _instance_fault(plugin: Plugin) -> str:
    """Says what the constructor of a foreign class did not set, or set to a wrong value. Empty if the constructor did nothing wrong."""
    if not foreign(type(plugin)):
        return ""
    if not (hasattr(plugin, "name") and hasattr(plugin, "params")):
        return "has a constructor that does not call super().__init__(name, params)"
    return keys_fault(plugin)


def stability(cls: type[Plugin]) -> str:
    """Returns the stability of a type: `stable`, `experimental` (needs a flag) or `external` (not built in)."""
    if foreign(cls):
        return "external"
    return "experimental" if cls.type_name in EXPERIMENTAL_TYPES else "stable"
