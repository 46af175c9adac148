"""Plugin types by name, and instances of them.

Own plugins are found by walking `epp/plugins` in sorted order; others by the entry-point group
ENTRY_POINTS of installed distributions, or by `type: package.module:Class` in a configuration. A
module that cannot be imported stops the start: half a set of plugins is no set.

REFERENCE_TYPES are the names that the field's reference picker (llm-d-router) knows; one that is
not ours yet is refused as such, not as a misspelling.
"""

import functools
import importlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

import epp.plugins
from epp.findings import nearest
from epp.plugin import EXTENSION_POINTS, REGISTERED, Plugin, plugin

ENTRY_POINTS = "endpoint_picker.plugins"

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
        try:
            loaded = entry.load()
        except Exception as error:  # foreign code at start: whatever it raises, the start ends here
            raise PluginImportError(
                f"entry point '{entry.name}' ({entry.value}) of group {ENTRY_POINTS} cannot be imported: {_said(error)}"
            ) from error
        if isinstance(loaded, type) and issubclass(loaded, Plugin) and not loaded.type_name:
            plugin(entry.name)(loaded)


def _own_modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(epp.plugins.__path__, "epp.plugins.", onerror=_unreadable):
        yield module.name


def _unreadable(name: str) -> None:
    _load(name)  # raises with the cause


def _load(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # as above
        raise PluginImportError(f"plugin module {module} cannot be imported: {_said(error)}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
            "'epp plugins' lists those that are",
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
            made[spec.name] = spec.cls(spec.name, spec.params)
        except ValueError as error:
            failed.append(Failed(spec.name, str(error)))
        except Exception as error:  # a constructor may be foreign code: its fault is told with its name
            failed.append(Failed(spec.name, _said(error)))
    return made, failed
