"""Reads the values of the Helm chart in layers, from files and options, and checks them.

A later layer overrides an earlier one: mappings are merged, everything else is replaced. All unknown names and wrong types are refused
together.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

import msgspec

from epp.config import yaml_nodes
from epp.config.findings import Findings
from workers.cli.manifests.values import Json, Values

INSTEAD: Final[Mapping[str, str]] = {  # values of the reference's chart that are refused -> what to do instead
    "router.latencyPredictor": "this chart installs no predictor; name a running one in predicted-latency-producer",
    "router.monitoring.provider": "only the Prometheus operator is supported; remove it",
    "router.proxy": "the Envoy in the picker's pod has its own settings; remove it",
    "provider.gke": "this chart has no objects for GKE; remove it, and apply them beside it",
}
_AT = re.compile(r"(.*?)(?: - at `\$(.*)`)?")
_STEP = re.compile(r"((?:\\.|[^.\[\]\\])+)|\[(\d+)\]")


class BadValues(ValueError):
    """Raised for wrong values or options. The text has one line per error, with the value, the rule and the fix."""


class Layer(NamedTuple):
    """Some values, and the file name or the option with which the user gave them."""

    source: str
    values: Json


def checked(layers: Sequence[Layer]) -> Json:
    """Merges the layers. Raises BadValues with all unknown names and wrong types."""
    values = merged(layer.values for layer in layers)
    if wrong := list(faults(Values, values)):
        raise BadValues("\n".join(with_source(line, layers) for line in wrong))
    return values


def with_source(line: str, layers: Sequence[Layer]) -> str:
    """Adds to an error line the file name or the option with which the user gave the value. `line` begins with the path of the value."""
    steps = line.partition(":")[0].split(".")
    source = next((layer.source for layer in reversed(layers) if _has(layer.values, steps)), "")
    return f"{line} (given by {source})" if source else line


def _has(values: Any, steps: Sequence[str]) -> bool:
    """Returns whether these values have a value at a path. A step of the path may contain dots, and end with an index."""
    if not steps:
        return True
    if not isinstance(values, dict):
        return False
    for length in range(1, len(steps) + 1):
        name = ".".join(steps[:length]).partition("[")[0]
        if name in values and _has(values[name], steps[length:]):
            return True
    return False


def faults(kind: type[msgspec.Struct], values: Any, at: str = "") -> Iterator[str]:
    """Yields a line for each unknown name and for each value of a wrong type. `at`: the path of `values`."""
    if not isinstance(values, dict):
        yield f"{at or 'values'}: expected a mapping, got {_shown(values)}"
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for name, value in values.items():
        path = f"{at}.{name}" if at else str(name)
        field = fields.get(name)
        if field is None:
            yield f"{path}: {_unknown(path)}"
        elif isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from faults(field.type, value, path)
        elif wrong := _misfit(value, field.type):
            yield f"{path}{wrong}"


def _misfit(value: Any, kind: Any) -> str:
    """Returns what is wrong with a value, as the part of an error line that follows the path. Returns "" if nothing is wrong."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as wrong:
        match = _AT.fullmatch(str(wrong))
        assert match is not None
        told = match[1].replace("`", "'")
        return f"{match[2] or ''}: {told[:1].lower()}{told[1:]}"
    for meta in get_args(kind)[1:]:
        if isinstance(meta, msgspec.Meta) and value != (constant := (meta.extra_json_schema or {}).get("const", value)):
            return f": only {_shown(constant)} is supported; remove it"
    return ""


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def read(text: str, source: str) -> Json:
    """Parses a values file. Its scalars mean what they mean to helm: a date is text, and so is 1:30. Raises BadValues."""
    findings = Findings(source)
    root = yaml_nodes.read(text, findings)
    if findings.errors:
        raise BadValues("\n".join(f"{each.file}:{each.line}: {each.message}" for each in findings.errors))
    found = None if root is None else root.plain()
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadValues(f"{source}: values are a mapping with router, provider or httpRoute; this is a {type(found).__name__}")
    return found


def merged(layers: Iterable[Mapping[str, Any]]) -> Json:
    """Merges layers of values. A later layer overrides an earlier one: mappings are merged, everything else is replaced."""
    result: Json = {}
    for layer in layers:
        for key, value in layer.items():
            under = result.get(key)
            both = isinstance(under, dict) and isinstance(value, dict)
            result[key] = merged((under, value)) if both else value  # type: ignore[arg-type]
    return result


def assigned(text: str) -> Json:
    """Parses `--set a.b[0].c=value` as helm does, but without helm's lists in braces and its commas. Raises BadValues."""
    path, equals, value = text.partition("=")
    steps = [(name, index) for name, index in _STEP.findall(path)]
    if not equals or not path or not steps or steps[0][1]:
        raise BadValues(f"--set {text}: write name.name=value, for example router.epp.replicas=2")
    result: Any = _scalar(value)
    for name, index in reversed(steps):
        result = {re.sub(r"\\(.)", r"\1", name): result} if name else _at(int(index), result, text)
    assert isinstance(result, dict)
    return result


def _at(index: int, value: Any, text: str) -> list[Any]:
    if index:
        raise BadValues(f"--set {text}: lists are set as a whole or by [0]; use a file with --values for longer ones")
    return [value]


def _scalar(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text == "null":
        return None
    return int(text) if re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) else text


def _unknown(path: str) -> str:
    """Returns the text of the error about an unknown value: what to write instead, if the reference has this value, or the nearest name."""
    steps = path.split(".")
    above = (".".join(steps[:length]) for length in range(len(steps), 0, -1))
    if instead := next((INSTEAD[name] for name in above if name in INSTEAD), ""):
        return f"not supported: {instead}"
    near = difflib.get_close_matches(path, _paths(Values), n=1, cutoff=0.6)
    return "there is no such value; " + (f"did you mean {near[0]}?" if near else "see values.yaml of the chart")


def _paths(kind: type[msgspec.Struct], at: str = "") -> list[str]:
    found = []
    for field in msgspec.structs.fields(kind):
        path = f"{at}.{field.encode_name}" if at else field.encode_name
        found.append(path)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found += _paths(field.type, path)
    return found
