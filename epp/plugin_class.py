"""What can be told of a foreign plugin class before anything is made of it: that it is one, and can be called as its points are.

Otherwise a misspelt method or a wrong parameter would fail every request, or the start with a stack trace. What this does not do:
run any of the class, or know what its methods return.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FunctionType
from typing import Any, Final

import msgspec

from epp.data import Key
from epp.metrics import PLUGIN_LABELS, TAKEN, Metric
from epp.plugin import EXTENSION_POINTS, Plugin

KEYS: Final = ("consumes", "produces", "optional", "keeps")
PARAMS: Final = "write class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True)"
_METRIC = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def fault(cls: object) -> str:
    """What is wrong with it, with what to write instead; nothing is the empty text."""
    points = [point for point in EXTENSION_POINTS if isinstance(cls, type) and issubclass(cls, point)]
    if not (isinstance(cls, type) and issubclass(cls, Plugin) and points):
        return "is no plugin class: inherit an extension point of epp.plugin, for example Scorer"
    if not (isinstance(cls.Params, type) and issubclass(cls.Params, msgspec.Struct)):
        return f"has Params that are no msgspec.Struct: {PARAMS}"
    try:
        msgspec.json.schema(cls.Params)
    except Exception as error:  # of annotations that are no types, or of types that no file can give
        return f"has Params with a field that cannot be read from a file: {str(error).splitlines()[-1]:.200}"
    if wrong := keys_fault(cls) or _metrics_fault(cls.metrics):
        return wrong
    methods = ((name, method) for point in (Plugin, *points) for name, method in vars(point).items())
    faults = (_method_fault(cls, name, method) for name, method in methods if isinstance(method, FunctionType))
    return next(filter(None, faults), "")


def keys_fault(of: object) -> str:
    """Of what a class, or an instance, says that it reads and produces."""
    for name in KEYS:
        keys = getattr(of, name)
        if not hasattr(keys, "__get__") and not _are_keys(keys):
            return f"has {name} = {keys!r:.80}: write a tuple of Column or Datum (epp.data), with a comma behind a single one"
    return ""


def _metrics_fault(metrics: object) -> str:
    if isinstance(metrics, Metric) or not isinstance(metrics, Sequence):
        return f"has metrics = {metrics!r:.80}: write a tuple of Metric (epp.metrics), with a comma behind a single one"
    return next(filter(None, map(_metric_fault, metrics)), "")


def _metric_fault(metric: object) -> str:
    """One that is wrong would make the whole page unreadable for Prometheus."""
    if not isinstance(metric, Metric):
        return f"has metrics with {metric!r:.80}: write Metric(name, kind, help, ...)"
    what = f"has a metric {metric.name!r:.80}"
    if not _METRIC.fullmatch(str(metric.name)):
        return f"{what}: a name has letters, digits and '_', no digit first"
    if not isinstance(metric.help, str) or "\n" in metric.help:
        return f"{what} with help {metric.help!r:.80}: write one line"
    if metric.kind == "counter" and not metric.name.endswith("_total"):
        return f"{what}: a counter's name ends in _total"
    if metric.name in TAKEN:
        return f"{what}, which is one of the picker's own: choose another name"
    if metric.kind not in ("counter", "histogram") or (metric.kind == "histogram" and metric.labels):
        return f"{what} of kind '{metric.kind}' with labels {metric.labels}: plugins can have counters, and histograms without labels"
    if metric.kind == "histogram" and (not metric.buckets or any(a >= b for a, b in pairwise(metric.buckets))):
        return f"{what} with buckets {metric.buckets!r:.80}: a histogram has one or more, each above the one before"
    if isinstance(metric.labels, str) or not all(_METRIC.fullmatch(label) for label in metric.labels):
        return f"{what} with labels {metric.labels!r:.80}: write a tuple of names, with a comma behind a single one"
    if len({*PLUGIN_LABELS, *metric.labels}) < len(PLUGIN_LABELS) + len(metric.labels):
        return (
            f"{what} with labels {metric.labels!r:.80}: each once, and {' and '.join(PLUGIN_LABELS)} are there anyway"
        )
    return ""


def _are_keys(found: object) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str) and all(isinstance(key, Key) for key in found)


def _method_fault(cls: type[Plugin], name: str, declared: FunctionType) -> str:
    """Of one method that an extension point declares."""
    own = inspect.getattr_static(cls, name)
    if own is declared:
        missing = "NotImplementedError" in declared.__code__.co_names  # the others have something to go on with
        return f"has no method {name}{_parameters(declared)}" if missing else ""
    if not isinstance(own, FunctionType):
        return ""  # what it takes shows only when it is called
    if inspect.iscoroutinefunction(own) or inspect.isgeneratorfunction(own) or inspect.isasyncgenfunction(own):
        return f"has a method {name} that is a coroutine or generator: it must give its result when it is called"
    try:
        inspect.signature(own).bind(*inspect.signature(declared).parameters)
    except TypeError:
        return f"has a method {name}{_parameters(own)}: it is called as {name}{_parameters(declared)}"
    return ""


def _parameters(method: Callable[..., Any]) -> str:
    """Their names alone, and where those begin that are given by name."""
    names: list[str] = []
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(name)
    return f"({', '.join(names)})"
