"""`epp config plugins` and `schema`: list the plugin types that a configuration may name, with the data that they produce and read; and
print a JSON Schema of the configuration file, for editors.

Write the schema to a file: epp config schema > epp.config.schema.json
Name that file in the first line of a configuration: # yaml-language-server: $schema=epp.config.schema.json
"""

import json
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import click
import msgspec

from compiled.finder import docstring, source
from epp.config import registry
from epp.config.flow_assembly import words
from epp.config.pools_file import pools_schema
from epp.config.registry import FOLDER_PACKAGE
from epp.config.schema import parameters_schema, summary
from epp.config.schema import schema as schema_of
from epp.data import COUNTED, Key
from epp.metrics import PLUGIN_LABELS, PREFIX
from epp.plugin import Plugin, Scorer
from epp.points.parameters import RANGE, WEIGHT_FACTOR
from epp.request.flows import Capability
from workers.cli.configuration import add_plugins, plugin_path_option
from workers.cli.output import echo_text

Entry = dict[str, Any]

LINE_CHARS, NAME_CHARS = 120, 41
RUNTIME = "the picker"  # the producer of the load in flight, which the picker counts itself
_RANGES = (  # keywords of a JSON Schema, in words
    ("enum", "one of {}"), ("const", "{}"), ("minimum", ">= {}"), ("exclusiveMinimum", "> {}"), ("maximum", "<= {}"),
    ("exclusiveMaximum", "< {}"), ("minLength", "at least {} characters"), ("minItems", "at least {}"), ("pattern", "matches {}"),
)  # fmt: skip


@click.command("plugins")
@click.argument("type_name", metavar="[TYPE]", default="")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with a JSON schema of the parameters.")
@plugin_path_option
def command(type_name: str, as_json: bool, plugin_path: str) -> None:
    """List the plugin types, one per line, by extension point.

    With TYPE, show everything about that type: parameters with defaults and ranges, data with producers and readers.
    """
    types = _known(plugin_path)
    entries = listing(types)
    if type_name:
        if type_name not in types:
            hint = registry.suggestion(type_name)
            raise click.ClickException(f"plugin type '{type_name}' is not registered" + (f" ({hint})" if hint else ""))
        entry = entries[types[type_name].type_name]
        echo_text(json.dumps(entry, indent=2, default=str) if as_json else _detail(entry))
        return
    echo_text(json.dumps(list(entries.values()), indent=2, default=str) if as_json else _overview(entries.values()))


@click.command("schema")
@click.option("--pools", is_flag=True, help="Print that of a file for --pools-file.")
@plugin_path_option
def print_schema(pools: bool, plugin_path: str) -> None:
    """Print a JSON Schema (2020-12) of the configuration file, with the parameters of every plugin type."""
    shown = pools_schema() if pools else schema_of(_known(plugin_path))
    echo_text(json.dumps(shown, indent=2, ensure_ascii=False))


def _known(plugin_path: str) -> Mapping[str, type[Plugin]]:
    """Returns all plugin types by name. Raises ClickException if a module of a plugin cannot be imported."""
    add_plugins(plugin_path)
    try:
        return registry.known()
    except registry.PluginImportError as error:
        raise click.ClickException(str(error)) from error


def listing(types: Mapping[str, type[Plugin]]) -> dict[str, Entry]:
    """Describes all types by name. Adds which types produce the data that a type reads, and which types read the data of a type."""
    classes = dict(sorted({cls.type_name: cls for cls in types.values()}.items()))
    samples = {name: _sample(cls) for name, cls in classes.items()}
    entries = {name: describe(cls, samples[name]) for name, cls in classes.items()}
    for entry in entries.values():
        for read in entry["reads"]:
            producers = [name for name, sample in samples.items() if _has(sample.produces, read["key"])]
            read["producers"] = [RUNTIME] if read["key"] in COUNTED else producers
        for emitted in entry["emits"]:
            emitted["readers"] = [name for name, sample in samples.items() if _has((*sample.consumes, *sample.optional), emitted["key"])]
    return entries


def describe(cls: type[Plugin], sample: Plugin | type[Plugin]) -> Entry:
    """Describes one type as plain values. `sample`: the instance or class with the keys of the data that it reads and produces."""
    return {
        "type": cls.type_name,
        "aliases": list(cls.aliases),
        "kinds": [point.__name__ for point in registry.kinds(cls)],
        "stability": registry.stability(cls),
        "module": cls.__module__,
        "file": source(cls.__module__),
        "summary": summary(cls),
        "text": docstring(cls),
        "parameters": _parameters(cls),
        "schema": parameters_schema(cls),
        "weight_tuned_by": WEIGHT_FACTOR if issubclass(cls, Scorer) else None,
        "reads": [
            *({"key": key.name, "type": key.type.__name__} for key in sample.consumes),
            *({"key": key.name, "type": key.type.__name__, "optional": True} for key in sample.optional),
        ],
        "emits": [{"key": key.name, "type": key.type.__name__} for key in sample.produces],
        "metrics": [{"name": PREFIX + m.name, "kind": m.kind, "labels": m.labels, "help": m.help} for m in cls.metrics],
        "queue": _of_queues(cls),
    }


def _of_queues(cls: type[Plugin]) -> Entry:
    """Describes the abilities of a queue of flow control, or the abilities that a policy needs of its queue."""
    capabilities = {"can": getattr(cls, "capabilities", None), "needs": getattr(cls, "queue_needs", None)}
    return {what: words(each) for what, each in capabilities.items() if isinstance(each, Capability)}


def _has(keys: Iterable[Key[Any]], name: str) -> bool:
    return any(key.name == name for key in keys)


def _sample(cls: type[Plugin]) -> Plugin | type[Plugin]:
    """Returns an instance with default parameters, because the keys of its data may depend on parameters.

    Returns the class if a parameter has no default.
    """
    try:
        params = msgspec.convert({}, cls.Params)
        return registry.made(cls.type_name, cls, params)
    except (msgspec.ValidationError, ValueError):  # a parameter is required, or the constructor refuses the defaults
        return cls


def _parameters(cls: type[Plugin]) -> list[Entry]:
    schema = parameters_schema(cls)
    parts = schema.get("$defs", {})
    properties = parts.get(schema.get("$ref", "").rpartition("/")[2], schema).get("properties", {})
    return [_parameter(field, properties.get(field.encode_name, {}), parts) for field in msgspec.structs.fields(cls.Params)]


def _parameter(field: msgspec.structs.FieldInfo, schema: Entry, parts: Entry) -> Entry:
    kind, limits = _kind(schema, parts)
    entry: Entry = {
        "description": schema.get("description", ""),
        "name": field.encode_name,
        "required": field.required,
        "type": kind,
        "range": limits,
    }
    if not field.required:
        has_factory = field.default_factory is not msgspec.NODEFAULT
        entry["default"] = msgspec.to_builtins(field.default_factory() if has_factory else field.default)
    return entry


def _kind(schema: Entry, parts: Entry) -> tuple[str, str]:
    """Describes the type and the range of a parameter. `parts`: the definitions of its JSON Schema."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    kinds, limits = [], []
    for option in options:
        target = parts.get(option["$ref"].rpartition("/")[2], {}) if "$ref" in option else option
        kind = target.get("type", "")
        if kind == "array" and (inner := _kind(target.get("items", {}), parts)[0]):
            kind = f"array of {inner}"
        kinds.append(kind)
        if RANGE in target:
            limits.append("tuned from {:,} to {:,}".format(*target[RANGE]))
        limits += [text.format(_listed(target[name])) for name, text in _RANGES if name in target and kind != "object"]
    return " or ".join(dict.fromkeys(filter(None, kinds))), ", ".join(limits)


def _listed(value: Any) -> str:
    return ", ".join(str(part) or '""' for part in value) if isinstance(value, list) else str(value)


def _overview(entries: Iterable[Entry]) -> str:
    """Describes each type in a line, under the first of its extension points."""
    sections: dict[str, list[str]] = {}
    for entry in entries:
        stability = "" if entry["stability"] == "stable" else f"({entry['stability']}) "
        line = textwrap.shorten(f"{stability}{entry['summary']}", LINE_CHARS - NAME_CHARS - 3, placeholder=" …")
        sections.setdefault(entry["kinds"][0], []).append(f"  {entry['type']:<{NAME_CHARS}} {line}".rstrip())
    return "\n\n".join("\n".join([kind, *lines]) for kind, lines in sorted(sections.items()))


def _text(entry: Entry) -> str:
    """Describes one type: extension points, data and parameters with their meaning."""
    stability = "" if entry["stability"] == "stable" else f", {entry['stability']}"
    lines = [f"{entry['type']}  [{', '.join(entry['kinds'])}{stability}]"]
    if entry["aliases"]:
        lines.append(f"    aliases: {', '.join(entry['aliases'])}")
    lines += [f"    reads: {_with(read, 'from', read['producers'])}" for read in entry["reads"]]
    lines += [f"    emits: {_with(emitted, 'read by', emitted['readers'])}" for emitted in entry["emits"]]
    lines += [f"    {'can' if what == 'can' else 'needs of its queue'}: {names}" for what, names in entry["queue"].items()]
    if entry["weight_tuned_by"]:
        by = entry["weight_tuned_by"]
        lines.append(f"    weight: tuned from 1/{by:.0f} to {by:.0f} times the configured one")
    for parameter in entry["parameters"]:
        default = "(required)" if parameter["required"] else f"= {json.dumps(parameter['default'])}"
        limits = ", ".join(filter(None, (parameter["type"], parameter["range"])))
        lines += [f"    {parameter['name']} {default}" + (f"  ({limits})" if limits else "")]
        lines += _meaning(parameter["description"])
    return "\n".join(lines)


def _meaning(text: str) -> list[str]:
    return textwrap.wrap(text, width=100, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _with(key: Entry, word: str, types: list[str]) -> str:
    optional = ", optional" if key.get("optional") else ""
    return f"{key['key']} ({word} {', '.join(types) if types else 'no registered type'}{optional})"


def _detail(entry: Entry) -> str:
    lines = [
        _text(entry),
        *(f"    {m['kind']}: {m['name']}{{{','.join((*PLUGIN_LABELS, *m['labels']))}}}" for m in entry["metrics"]),
        f"    file: {entry['file']}" if entry["module"].startswith(FOLDER_PACKAGE) else f"    module: {entry['module']}",
        *(["", entry["text"]] if entry["text"] else []),
    ]
    return "\n".join([*lines, *_forms(entry["schema"])])


def _forms(schema: Entry) -> list[str]:
    """Describes the parameters as a whole (their docstring), and the fields of the structs within them."""
    parts = schema.get("$defs", {})
    whole = schema.get("$ref", "").rpartition("/")[2]
    lines: list[str] = []
    for name in (whole, *(part for part in sorted(parts) if part != whole)):
        part = parts.get(name, {})
        about = " ".join(part.get("description", "").split())
        if name == whole:
            lines += ["", f"Parameters: {about}"] if about and part.get("properties") else []
            continue
        lines += ["", f"{name}: {about}"]
        for field, of in part.get("properties", {}).items():
            default = "(required)" if field in part.get("required", ()) else f"= {json.dumps(of.get('default'))}"
            limits = ", ".join(filter(None, _kind(of, parts)))
            lines += [f"    {field} {default}" + (f"  ({limits})" if limits else "")]
            lines += _meaning(of.get("description", ""))
    return lines
