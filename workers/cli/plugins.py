"""`epp plugins`: every plugin type that a configuration may name."""

import json
from typing import Any

import click
import msgspec

from epp import registry
from epp.plugin import EXTENSION_POINTS, Plugin

Entry = dict[str, Any]


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with a JSON schema of the parameters.")
def command(as_json: bool) -> None:
    """List the plugin types: kind, parameters with defaults, what they read and emit."""
    try:
        types = registry.known()
    except registry.PluginImportError as error:
        raise click.ClickException(str(error)) from error
    classes = sorted({cls.type_name: cls for cls in types.values()}.items())
    entries = [describe(cls) for _, cls in classes]
    click.echo(json.dumps(entries, indent=2, default=str) if as_json else "\n".join(map(_text, entries)))


def describe(cls: type[Plugin]) -> Entry:
    """One type as plain values."""
    reads, emits = _keys(cls)
    return {
        "type": cls.type_name,
        "aliases": list(cls.aliases),
        "kinds": [point.__name__ for point in EXTENSION_POINTS if issubclass(cls, point)],
        "experimental": cls.type_name in registry.EXPERIMENTAL_TYPES,
        "module": cls.__module__,
        "summary": (cls.__doc__ or "").strip().partition("\n")[0],
        "parameters": [_parameter(field) for field in msgspec.structs.fields(cls.Params)],
        "schema": msgspec.json.schema(cls.Params),
        "reads": reads,
        "emits": emits,
    }


def _keys(cls: type[Plugin]) -> tuple[list[str], list[str]]:
    """Names of what an instance with default parameters reads and emits; else those of the class."""
    plugin: Plugin | type[Plugin] = cls
    try:
        params = msgspec.convert({}, cls.Params)
    except msgspec.ValidationError:  # a parameter is required
        pass
    else:
        made, _ = registry.instances([registry.Spec(cls.type_name, cls, params)])
        plugin = made.get(cls.type_name, cls)
    return [key.name for key in plugin.consumes], [key.name for key in plugin.produces]


def _parameter(field: msgspec.structs.FieldInfo) -> Entry:
    entry: Entry = {"name": field.encode_name, "required": field.required}
    if not field.required:
        made = field.default_factory is not msgspec.NODEFAULT
        entry["default"] = msgspec.to_builtins(field.default_factory() if made else field.default)
    return entry


def _text(entry: Entry) -> str:
    kinds = ", ".join(entry["kinds"]) + (", experimental" if entry["experimental"] else "")
    lines = [f"{entry['type']}  [{kinds}]"]
    if entry["summary"]:
        lines.append(f"    {entry['summary']}")
    lines.extend(f"    {label}: {', '.join(entry[label])}" for label in ("aliases", "reads", "emits") if entry[label])
    for parameter in entry["parameters"]:
        default = "(required)" if parameter["required"] else f"= {json.dumps(parameter['default'])}"
        lines += [f"    {parameter['name']} {default}"]
    return "\n".join(lines) + "\n"
