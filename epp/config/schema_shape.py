"""Makes the JSON Schema easier for tools: alternatives that validators can point into, and descriptions from docstrings.

For `anyOf`, a validator only reports, at the place of the whole value, that no alternative fits. `pointed` replaces `anyOf` wherever the
alternatives differ in their types, so that the validator's message names the wrong item. `described` takes the description of a field from
the docstring of its struct: from `field_name: text` at the beginning of a line, or from a sentence that begins with the name in backquotes
and a colon.
"""

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

Json = dict[str, Any]

NULL: Final = {"type": "null"}
OR_NULL: Final = "OrNull"  # suffix for the names of parts that may also be null
REF: Final = "#/$defs/"
STRUCTS_MAX: Final = 512  # more than the built-in plugins have
_FIELD = re.compile(r"^(\w+): ", re.MULTILINE)
_SENTENCE = re.compile(r"`(\w+)`: (.+?\.)(?= [`A-Z]|$)")
_SNAKE = re.compile(r"`[a-z]+(?:_[a-z]+)+`")


def described(part: Json, struct: type[msgspec.Struct]) -> Json:
    """Returns a struct's schema. Adds the descriptions of the struct and of its fields from the struct's docstring."""
    about, texts = field_texts(struct)
    result = {key: value for key, value in part.items() if key != "description"} | ({"description": about} if about else {})
    encoded = {field.name: field.encode_name for field in msgspec.structs.fields(struct)}
    properties = {name: dict(value) for name, value in part.get("properties", {}).items()}
    for name, text in texts.items():
        properties[encoded[name]].setdefault("description", text)
    return result | ({"properties": properties} if properties else {})


@functools.lru_cache(STRUCTS_MAX)
def field_texts(struct: type[msgspec.Struct]) -> tuple[str, Mapping[str, str]]:
    """Returns the description of a struct, and those of its fields by their names in the code. Keeps those of STRUCTS_MAX structs.

    If a struct inherits a field, the docstring of the base class may describe the field.
    """
    names = {field.name for field in msgspec.structs.fields(struct)}
    abouts, texts = [], dict[str, str]()
    for cls in struct.__mro__:
        text = inspect.cleandoc(vars(cls).get("__doc__") or "")
        begins = [match for match in _FIELD.finditer(text) if match[1] in names]
        ends = [*(match.start() for match in begins[1:]), len(text)][: len(begins)]
        for match, end in zip(begins, ends, strict=True):
            texts.setdefault(match[1], as_in_files(" ".join(text[match.end() : end].split())))
        about = " ".join(text[: begins[0].start() if begins else len(text)].split())
        for match in _SENTENCE.finditer(about):
            if match[1] in names:
                texts.setdefault(match[1], as_in_files(match[2][:1].upper() + match[2][1:]))
        abouts.append(about)
    return as_in_files(abouts[0]), texts


def as_in_files(text: str) -> str:
    """Replaces names of fields in the code (snake_case) by their names in a file (camelCase)."""
    return _SNAKE.sub(lambda found: re.sub("_(.)", lambda letter: letter[1].upper(), found[0]), text)


def pointed(parts: Mapping[str, Json]) -> dict[str, Json]:
    """Replaces each `anyOf` between types in these parts. If a part may be null somewhere, adds a second form of it that allows null."""
    result: dict[str, Json] = {}
    nullable: set[str] = set()
    for name, part in parts.items():
        result[name] = _pointed(part, nullable)
    for name in nullable:
        result[name + OR_NULL] = result[name] | {"type": ["object", "null"]}
    used = {ref for part in result.values() for ref in _refs(part)}
    return {name: part for name, part in result.items() if name in used or name + OR_NULL not in result}


def _pointed(node: Any, nullable: set[str]) -> Any:
    if isinstance(node, list):
        return [_pointed(each, nullable) for each in node]
    if not isinstance(node, dict):
        return node
    node = {key: _pointed(value, nullable) for key, value in node.items()}
    if "anyOf" not in node:
        return node
    options = [each for option in node["anyOf"] for each in (option["anyOf"] if set(option) == {"anyOf"} else [option])]
    around = {key: value for key, value in node.items() if key != "anyOf"}
    rest = [option for option in options if option != NULL]
    if len(rest) == 1 and "$ref" in rest[0]:
        name = rest[0]["$ref"].removeprefix(REF)
        nullable.add(name)
        return rest[0] | {"$ref": f"{REF}{name}{OR_NULL}"} | around
    if len(rest) == 1 and "enum" in rest[0]:
        return rest[0] | {"enum": [*rest[0]["enum"], None]} | around
    merged = _merged(options)
    return node if merged is None else merged | around


def _merged(options: list[Json]) -> Json | None:
    """Joins alternatives of different types into one schema, since most keywords apply to one type only.

    Returns None if the joined schema would mean something else.
    """
    result: Json = {}
    kinds: list[str] = []
    for option in options:
        if not isinstance(kind := option.get("type"), (str, list)):
            return None
        kinds += [kind] if isinstance(kind, str) else kind
        for key, value in option.items():
            if key != "type" and result.setdefault(key, value) != value:
                return None
    return result | {"type": list(dict.fromkeys(kinds))}


def _refs(node: Any) -> set[str]:
    if isinstance(node, list):
        return {ref for each in node for ref in _refs(each)}
    if not isinstance(node, dict):
        return set()
    found = {ref for value in node.values() for ref in _refs(value)}
    return found | ({node["$ref"].removeprefix(REF)} if "$ref" in node else set())
