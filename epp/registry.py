"""Plugin types by name, and instances of them.

Own plugins are found by walking `epp/plugins` in sorted order; others by the entry-point group
ENTRY_POINTS of installed distributions, in the files of a folder (`add_folder`), or by `type:
package.module:Class` in a configuration. A module that cannot be imported stops the start: half a
set of plugins is no set. No name is ever given to a second class.

REFERENCE_TYPES are the names that the field's reference picker (llm-d-router) knows; one that is
not ours yet is refused as such, not as a misspelling.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

import epp.plugins
from epp.findings import nearest
from epp.plugin import EXTENSION_POINTS, OWN_PACKAGE, REGISTERED, Plugin, foreign, plugin
from epp.plugin_class import fault, keys_fault

ENTRY_POINTS = "epp.plugins"
FOLDER_PACKAGE = "epp_plugin_path"  # private: files of a folder are its modules, whatever else has their names

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
    prefill-header-handler prefix-based-pd-decider prefix-cache-affinity-filter prefix-cache-scorer
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
    multicluster-approx-prefix-cache-producer multicluster-file-discovery
    multicluster-kv-cache-utilization-scorer multicluster-metrics-data-source multicluster-metrics-extractor
    multicluster-prefix-cache-scorer multicluster-queue-scorer multicluster-session-affinity-filter
    p2p-source-producer priority-holdback-policy priority-then-time-eviction-order-policy
    session-affinity-filter session-affinity-scorer sheddable-eviction-filter soft-reflective-ceiling-policy
    topology-affinity-filter topology-affinity-scorer topology-extractor utilization-filter
"""
EXPERIMENTAL_TYPES = frozenset(_EXPERIMENTAL.split())
REFERENCE_TYPES = STABLE_TYPES | EXPERIMENTAL_TYPES
DEPRECATED_TYPES: Mapping[str, str] = {  # and what to write instead
    "by-label": "label-selector-filter",
    "by-label-selector": "label-selector-filter",
    "disagg-headers-handler": "disagg-profile-handler",
    "pd-profile-handler": "disagg-profile-handler",
    "precise-prefix-cache-scorer": "precise-prefix-cache-producer with prefix-cache-scorer",
    "prefill-header-handler": "disagg-profile-handler",
    "tokenizer": "token-producer",
}
INSTEAD: Mapping[str, str] = {  # of types that do not exist here, and have something near
    "precise-prefix-cache-scorer": "use prefix-cache-scorer with approx-prefix-cache-producer, which needs no events of the servers",
    "precise-prefix-cache-producer": "use approx-prefix-cache-producer, which needs no events of the servers",
}


class PluginImportError(Exception):
    """A plugin module that cannot be imported; an installation fault, not one of a configuration."""


class UnknownType(Exception):
    """A `type` that gives no class. `rule` and `hint` are for the error that is shown."""

    def __init__(self, rule: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.rule = rule
        self.hint = hint


class Failed(NamedTuple):
    """A plugin whose constructor refused; `why` starts with the parameter's path where it has one."""

    name: str
    why: str


class Spec(NamedTuple):
    """What an instance is made of."""

    name: str
    cls: type[Plugin]
    params: msgspec.Struct


def known() -> Mapping[str, type[Plugin]]:
    """All registered types by name and alias."""
    _import_all()
    return REGISTERED


@functools.cache
def _import_all() -> None:
    for module in sorted(_own_modules()):
        _load(module)
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    for entry in sorted(found, key=lambda entry: (entry.name, entry.value)):
        where = f"entry point '{entry.name}' ({entry.value}) of group {ENTRY_POINTS}"
        before = set(REGISTERED)
        try:
            loaded = entry.load()
            if isinstance(loaded, type) and issubclass(loaded, Plugin) and not loaded.type_name:
                plugin(entry.name)(loaded)
        except (Exception, SystemExit) as error:  # foreign code at start: whatever it raises, the start ends here
            raise PluginImportError(f"{where} cannot be imported: {_said(error)}") from error
        brought = [REGISTERED[name] for name in REGISTERED if name not in before]
        if not (brought or isinstance(loaded, types.ModuleType)):
            brought = [loaded]  # it was there already, or it is no plugin class
        for cls in brought:
            if wrong := fault(cls):
                raise PluginImportError(f"{where}: class {getattr(cls, '__name__', cls)} {wrong}")


def _own_modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(epp.plugins.__path__, OWN_PACKAGE, onerror=_unreadable):
        yield module.name


def _unreadable(name: str) -> None:
    _load(name)  # raises with the cause


def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # as above
        raise PluginImportError(f"plugin module {module} cannot be imported: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class _FromSource(importlib.machinery.SourceFileLoader):
    """Neither reads nor leaves compiled files: what stands in the folder is what runs, and the folder may be read-only."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _FolderFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of one folder's package, for files that import each other by `from . import ...` too."""

    def __init__(self, package: str, folder: str) -> None:
        self.package = package
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.rpartition(".")[0] != self.package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, [self.folder])
        if (
            spec is not None
            and spec.origin is not None
            and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        ):
            spec.loader = _FromSource(fullname, spec.origin)
            spec.cached = None
        return spec


def add_folder(folder: str) -> list[str]:
    """Imports every Python file of a folder, in sorted order, under a package of its own. Returns the types they register.

    Files whose names start with `_` are for the others to import. Raises `PluginImportError`, with the file and the cause.
    """
    _import_all()  # first, so that a file cannot take a name of ours
    package = f"{FOLDER_PACKAGE}_{sum(name.startswith(FOLDER_PACKAGE) and '.' not in name for name in sys.modules)}"
    sys.modules[package] = made = types.ModuleType(package)
    made.__path__ = [folder]
    sys.meta_path.insert(0, _FolderFinder(package, folder))
    importlib.invalidate_caches()
    found: list[str] = []
    for module in pkgutil.iter_modules([folder]):
        if not (module.ispkg or module.name.startswith("_")):
            found += _from_file(f"{package}.{module.name}", f"{folder.rstrip('/')}/{module.name}.py")
    if not found:
        raise PluginImportError(f"folder {folder} of plugins has no Python file that registers one")
    return found


def _from_file(module: str, file: str) -> list[str]:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # foreign code at start
        walked = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in walked if frame.f_globals.get("__name__") == module]
        where = f"{file}:{lines[-1]}" if lines else file
        raise PluginImportError(f"plugin file {where} cannot be imported: {_said(error)}") from error
    registered = [name for name, cls in REGISTERED.items() if cls.__module__ == module]
    for name in registered:
        if wrong := fault(REGISTERED[name]):
            raise PluginImportError(f"plugin file {file}: type '{name}': class {REGISTERED[name].__name__} {wrong}")
    if not registered:
        raise PluginImportError(
            f"plugin file {file} registers no plugin type; decorate a class with @plugin(...), or let the file's name start with _"
        )
    return registered


def find(type_name: str) -> type[Plugin]:
    """The class of a configured type, or `UnknownType`."""
    types = known()
    if type_name in types:
        return types[type_name]
    if ":" in type_name:
        return _by_path(type_name)
    if type_name in REFERENCE_TYPES:
        raise UnknownType(
            "unavailable-type",
            f"plugin type '{type_name}' of llm-d-router is not available in this version",
            INSTEAD.get(type_name, "'epp plugins' lists those that are"),
        )
    raise UnknownType(
        "unknown-type",
        f"plugin type '{type_name[:128]}' is not registered",
        nearest(type_name, types) or "'epp plugins' lists those that are",
    )


def _by_path(path: str) -> type[Plugin]:
    """`package.module:Class`."""
    if not _BY_PATH.fullmatch(path):
        raise UnknownType("unknown-type", f"plugin type '{path[:128]}' is not of the form package.module:Class")
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # foreign code: its failure is an error of the configuration that names it
        raise UnknownType(
            "plugin-import", f"plugin type '{path}': module {module} cannot be imported: {_said(error)}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Plugin) and kinds(cls)):
        raise UnknownType(
            "unknown-type",
            f"plugin type '{path}': {module} has no plugin class '{name}'",
            "a plugin inherits an extension point of epp.plugin",
        )
    if wrong := fault(cls):
        raise UnknownType("plugin-class", f"plugin type '{path}': the class {wrong}")
    return cls


def kinds(cls: type[Plugin]) -> tuple[type[Plugin], ...]:
    """The extension points that a class implements, in the order in which they run."""
    return tuple(point for point in EXTENSION_POINTS if issubclass(cls, point))


def instances(specs: Sequence[Spec]) -> tuple[dict[str, Plugin], list[Failed]]:
    """Makes every plugin; those that refuse their parameters are named, the others made."""
    made: dict[str, Plugin] = {}
    failed: list[Failed] = []
    for spec in specs:
        try:
            instance = spec.cls(spec.name, spec.params)
        except ValueError as error:
            failed.append(Failed(spec.name, str(error)))
        except (Exception, SystemExit) as error:  # a constructor may be foreign code: its fault is told with its name
            failed.append(Failed(spec.name, _said(error)))
        else:
            if wrong := _instance_fault(instance):
                failed.append(Failed(spec.name, f"class {spec.cls.__name__} {wrong}"))
            else:
                made[spec.name] = instance
    return made, failed


def _instance_fault(plugin: Plugin) -> str:
    """What the constructor of a foreign class has left out, or set wrongly."""
    if not foreign(type(plugin)):
        return ""
    if not (hasattr(plugin, "name") and hasattr(plugin, "params")):
        return "has a constructor that does not call super().__init__(name, params)"
    return keys_fault(plugin)


def stability(cls: type[Plugin]) -> str:
    """What may be expected of a type: `stable`, `experimental` (needs a flag) or `external` (not one of ours)."""
    if foreign(cls):
        return "external"
    return "experimental" if cls.type_name in EXPERIMENTAL_TYPES else "stable"
