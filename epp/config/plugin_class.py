"""Checks a foreign plugin class before an instance is made: it must be a plugin, with the methods that its extension points declare.

Without the check, a misspelt method or a wrong parameter would fail every request, or end the start with a stack trace. The check runs
no code of the class and does not know what its methods return.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FunctionType
from typing import Any, Final

import msgspec

from epp.data import Key
from epp.metrics import PLUGIN_LABELS, Metric
from epp.metrics.catalogue import TAKEN
from epp.plugin import EXTENSION_POINTS, Plugin

KEYS: Final = ("consumes", "produces", "optional", "keeps")
PARAMS: Final = "write class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True)"
_METRIC = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def fault(cls: object) -> str:
    """Says what is wrong with a class and what to write instead. Empty if nothing is wrong."""
    points = [point for point in EXTENSION_POINTS if isinstance(cls, type) and issubclass(cls, point)]
    if not (isinstance(cls, type) and issubclass(cls, Plugin) and points):
        return "is not a plugin class: inherit from an extension point of epp.plugin, for example Scorer"
    if not (isinstance(cls.Params, type) and issubclass(cls.Params, msgspec.Struct)):
        return f"has Params that is not a msgspec.Struct: {PARAMS}"
    try:
        msgspec.json.schema(cls.Params)
    except Exception as error:  # an annotation may name no type, or a type that a configuration file cannot express
        return f"has Params with a field that cannot be read from a file: {str(error).splitlines()[-1]:.200}"
    if wrong := keys_fault(cls) or _metrics_fault(cls.metrics):
        return wrong
    methods = ((name, method) for point in (Plugin, *points) for name, method in vars(point).items())
    faults = (_method_fault(cls, name, method) for name, method in methods if isinstance(method, FunctionType))
    return next(filter(None, faults), "")


def keys_fault(of: object) -> str:
    """Says what is wrong with the keys that a class or an instance reads and produces. Empty if nothing is wrong."""
    for name in KEYS:
        keys = getattr(of, name)
        listed = isinstance(keys, Sequence) and not isinstance(keys, str) and all(isinstance(key, Key) for key in keys)
        if not hasattr(keys, "__get__") and not listed:
            return f"has {name} = {keys!r:.80}: write a tuple of Column or Datum (epp.data), with a comma after a single one"
    return ""


def _metrics_fault(metrics: object) -> str:
    if isinstance(metrics, Metric) or not isinstance(metrics, Sequence):
        return f"has metrics = {metrics!r:.80}: write a tuple of Metric (epp.metrics), with a comma after a single one"
    return next(filter(None, map(_metric_fault, metrics)), "")


def _metric_fault(metric: object) -> str:
    """Says what is wrong with one metric. A wrong metric would make the whole metrics page unreadable for Prometheus."""
    if not isinstance(metric, Metric):
        return f"has metrics with {metric!r:.80}: write Metric(name, kind, help, ...)"
    what = f"has a metric {metric.name!r:.80}"
    if not _METRIC.fullmatch(str(metric.name)):
        return f"{what}: a name has letters, digits and '_', and does not start with a digit"
    if not isinstance(metric.help, str) or "\n" in metric.help:
        return f"{what} with help {metric.help!r:.80}: write one line"
    if metric.kind == "counter" and not metric.name.endswith("_total"):
        return f"{what}: a counter's name ends in _total"
    if metric.name in TAKEN:
        return f"{what}, which is a name of the picker itself: choose another name"
    if metric.kind not in ("counter", "gauge", "histogram") or (metric.kind == "histogram" and metric.labels):
        may = "a plugin may have counters, gauges, and histograms without labels"
        return f"{what} of kind '{metric.kind}' with labels {metric.labels}: {may}"
    if metric.kind == "histogram" and (not metric.buckets or any(a >= b for a, b in pairwise(metric.buckets))):
        return f"{what} with buckets {metric.buckets!r:.80}: a histogram has one or more, in rising order"
    if isinstance(metric.labels, str) or not all(_METRIC.fullmatch(label) for label in metric.labels):
        return f"{what} with labels {metric.labels!r:.80}: write a tuple of names, with a comma after a single one"
    if len({*PLUGIN_LABELS, *metric.labels}) < len(PLUGIN_LABELS) + len(metric.labels):
        return f"{what} with labels {metric.labels!r:.80}: name each once; {' and '.join(PLUGIN_LABELS)} are added to every metric"
    return ""


def _method_fault(cls: type[Plugin], name: str, declared: FunctionType) -> str:
    """Says what is wrong with one method that an extension point declares. Empty if nothing is wrong."""
    method = inspect.getattr_static(cls, name)
    if method is declared:
        # A method of the base class without NotImplementedError is a default.
        missing = "NotImplementedError" in declared.__code__.co_names
        return f"has no method {name}{_parameters(declared)}" if missing else ""
    if not isinstance(method, FunctionType):
        return ""  # the method's parameters are unknown until it is called
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        return f"has a method {name} that is a coroutine or generator: write a plain method that returns its result"
    try:
        inspect.signature(method).bind(*inspect.signature(declared).parameters)
    except TypeError:
        return f"has a method {name}{_parameters(method)}: it is called as {name}{_parameters(declared)}"
    return ""


def _parameters(method: Callable[..., Any]) -> str:
    """Lists the names of a method's parameters, with `*` before those that are passed by name."""
    names: list[str] = []
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(name)
    return f"({', '.join(names)})"
