"""`epp plugins`: every plugin type that a configuration may name, and who makes and reads which data."""

import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click
import msgspec

from epp import registry
from epp.data import COUNTED, Key
from epp.findings import nearest
from epp.flow_assembly import words
from epp.flows import Capability
from epp.metrics import PLUGIN_LABELS, PREFIX
from epp.plugin import Plugin
from epp.registry import FOLDER_PACKAGE
from epp.schema import parameters_schema, summary
from workers.cli.configuration import add_plugins, plugin_path_option

Entry = dict[str, Any]

RUNTIME = "the picker"  # counts what is in flight itself
_RANGES = (  # of a JSON Schema, in words
    ("enum", "one of {}"), ("const", "{}"), ("minimum", ">= {}"), ("exclusiveMinimum", "> {}"), ("maximum", "<= {}"),
    ("exclusiveMaximum", "< {}"), ("minLength", "at least {} characters"), ("minItems", "at least {}"), ("pattern", "matches {}"),
)  # fmt: skip


_SNAKE = re.compile(r"`[a-z]+(?:_[a-z]+)+`")  # a field as the code has it


@click.command("plugins")
@click.argument("type_name", metavar="[TYPE]", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with a JSON schema of the parameters.")
@plugin_path_option
def command(type_name: str, as_json: bool, plugin_path: str) -> None:
    """List the plugin types: extension points, parameters with defaults and ranges, data with producers and readers.

    With TYPE, tell all about that one.
    """
    add_plugins(plugin_path)
    try:
        types = registry.known()
    except registry.PluginImportError as error:
        raise click.ClickException(str(error)) from error
    entries = listing(types)
    if type_name:
        if type_name not in types:
            hint = nearest(type_name, types)
            raise click.ClickException(f"plugin type '{type_name}' is not registered" + (f" ({hint})" if hint else ""))
        entry = entries[types[type_name].type_name]
        click.echo(json.dumps(entry, indent=2, default=str) if as_json else _detail(entry))
        return
    shown = list(entries.values())
    click.echo(json.dumps(shown, indent=2, default=str) if as_json else "\n".join(map(_text, shown)))


def listing(types: Mapping[str, type[Plugin]]) -> dict[str, Entry]:
    """All types by name, each with who produces what it reads and who reads what it produces."""
    classes = dict(sorted({cls.type_name: cls for cls in types.values()}.items()))
    samples = {name: _sample(cls) for name, cls in classes.items()}
    entries = {name: describe(cls, samples[name]) for name, cls in classes.items()}
    for entry in entries.values():
        for read in entry["reads"]:
            made = [name for name, sample in samples.items() if _has(sample.produces, read["key"])]
            read["producers"] = [RUNTIME] if read["key"] in COUNTED else made
        for emitted in entry["emits"]:
            emitted["readers"] = [
                name for name, sample in samples.items() if _has((*sample.consumes, *sample.optional), emitted["key"])
            ]
    return entries


def describe(cls: type[Plugin], sample: Plugin | type[Plugin]) -> Entry:
    """One type as plain values. `sample` says what it reads and emits."""
    return {
        "type": cls.type_name,
        "aliases": list(cls.aliases),
        "kinds": [point.__name__ for point in registry.kinds(cls)],
        "stability": registry.stability(cls),
        "module": cls.__module__,
        "file": getattr(sys.modules.get(cls.__module__), "__file__", None),
        "summary": summary(cls),
        "text": inspect.cleandoc(cls.__doc__ or ""),
        "parameters": _parameters(cls),
        "schema": parameters_schema(cls),
        "reads": [
            *({"key": key.name, "type": key.type.__name__} for key in sample.consumes),
            *({"key": key.name, "type": key.type.__name__, "optional": True} for key in sample.optional),
        ],
        "emits": [{"key": key.name, "type": key.type.__name__} for key in sample.produces],
        "metrics": [{"name": PREFIX + m.name, "kind": m.kind, "labels": m.labels, "help": m.help} for m in cls.metrics],
        "queue": _of_queues(cls),
    }


def _of_queues(cls: type[Plugin]) -> Entry:
    """What a queue of flow control can do, and what a policy needs of one."""
    capabilities = {"can": getattr(cls, "capabilities", None), "needs": getattr(cls, "queue_needs", None)}
    return {what: words(each) for what, each in capabilities.items() if isinstance(each, Capability)}


def _has(keys: Iterable[Key[Any]], name: str) -> bool:
    return any(key.name == name for key in keys)


def _sample(cls: type[Plugin]) -> Plugin | type[Plugin]:
    """An instance with default parameters, since keys may depend on them; else the class."""
    try:
        params = msgspec.convert({}, cls.Params)
    except msgspec.ValidationError:  # a parameter is required
        return cls
    made, _ = registry.instances([registry.Spec(cls.type_name, cls, params)])
    return made.get(cls.type_name, cls)


def _parameters(cls: type[Plugin]) -> list[Entry]:
    schema = parameters_schema(cls)
    parts = schema.get("$defs", {})
    properties = parts.get(schema.get("$ref", "").rpartition("/")[2], schema).get("properties", {})
    return [
        _parameter(field, properties.get(field.encode_name, {}), parts) for field in msgspec.structs.fields(cls.Params)
    ]


def _parameter(field: msgspec.structs.FieldInfo, schema: Entry, parts: Entry) -> Entry:
    kind, limits = _kind(schema, parts)
    entry: Entry = {"name": field.encode_name, "required": field.required, "type": kind, "range": limits}
    if not field.required:
        made = field.default_factory is not msgspec.NODEFAULT
        entry["default"] = msgspec.to_builtins(field.default_factory() if made else field.default)
    return entry


def _kind(schema: Entry, parts: Entry) -> tuple[str, str]:
    """A parameter's type and its range, in words."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    kinds, limits = [], []
    for option in options:
        target = parts.get(option["$ref"].rpartition("/")[2], {}) if "$ref" in option else option
        kind = target.get("type", "")
        if kind == "array" and (inner := _kind(target.get("items", {}), parts)[0]):
            kind = f"array of {inner}"
        kinds.append(kind)
        limits += [text.format(_listed(target[name])) for name, text in _RANGES if name in target and kind != "object"]
    return " or ".join(dict.fromkeys(filter(None, kinds))), ", ".join(limits)


def _listed(value: Any) -> str:
    return ", ".join(str(part) or '""' for part in value) if isinstance(value, list) else str(value)


def _text(entry: Entry) -> str:
    stability = "" if entry["stability"] == "stable" else f", {entry['stability']}"
    lines = [f"{entry['type']}  [{', '.join(entry['kinds'])}{stability}]"]
    if entry["summary"]:
        lines.append(f"    {entry['summary']}")
    if entry["aliases"]:
        lines.append(f"    aliases: {', '.join(entry['aliases'])}")
    lines += [f"    reads: {_with(read, 'from', read['producers'])}" for read in entry["reads"]]
    lines += [f"    emits: {_with(emitted, 'read by', emitted['readers'])}" for emitted in entry["emits"]]
    lines += [
        f"    {'can' if what == 'can' else 'needs of its queue'}: {told}" for what, told in entry["queue"].items()
    ]
    for parameter in entry["parameters"]:
        default = "(required)" if parameter["required"] else f"= {json.dumps(parameter['default'])}"
        told = ", ".join(filter(None, (parameter["type"], parameter["range"])))
        lines += [f"    {parameter['name']} {default}" + (f"  ({told})" if told else "")]
    return "\n".join(lines) + "\n"


def _as_in_files(field: re.Match[str]) -> str:
    first, *others = field[0].strip("`").split("_")
    return "`" + first + "".join(map(str.capitalize, others)) + "`"


def _with(key: Entry, word: str, types: list[str]) -> str:
    optional = ", optional" if key.get("optional") else ""
    return f"{key['key']} ({word} {', '.join(types) if types else 'no registered type'}{optional})"


def _detail(entry: Entry) -> str:
    """One type, with everything that its class says."""
    text = _text(entry | {"summary": ""}).rstrip("\n")
    told = [
        text,
        *(f"    {m['kind']}: {m['name']}{{{','.join((*PLUGIN_LABELS, *m['labels']))}}}" for m in entry["metrics"]),
        f"    file: {entry['file']}"
        if entry["module"].startswith(FOLDER_PACKAGE)
        else f"    module: {entry['module']}",
        *(["", entry["text"]] if entry["text"] else []),
    ]
    return "\n".join([*told, *_forms(entry["schema"])])


def _forms(schema: Entry) -> list[str]:
    """What the parameters as a whole say of themselves (what empty values stand for), and the fields of those within them."""
    parts = schema.get("$defs", {})
    whole = schema.get("$ref", "").rpartition("/")[2]
    lines: list[str] = []
    for name in (whole, *(other for other in sorted(parts) if other != whole)):
        part = parts.get(name, {})
        about = _SNAKE.sub(_as_in_files, " ".join(part.get("description", "").split()))
        if name == whole:
            lines += ["", f"Parameters: {about}"] if about and part.get("properties") else []
            continue
        lines += ["", f"{name}: {about}"]
        for field, of in part.get("properties", {}).items():
            default = "(required)" if field in part.get("required", ()) else f"= {json.dumps(of.get('default'))}"
            told = ", ".join(filter(None, _kind(of, parts)))
            lines += [f"    {field} {default}" + (f"  ({told})" if told else "")]
    return lines
