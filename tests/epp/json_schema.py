"""As much of JSON Schema 2020-12 as our schemas use, to hold documents against them; a keyword that it does not know is an error."""

import re
from collections.abc import Iterator
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int, "number": (int, float),
}  # fmt: skip
SAID_ONLY = {"$schema", "$defs", "title", "description", "default", "deprecated", "x-tuned-range", "$comment", "format", "enumDescriptions"}
COMPARED = {
    "minimum": lambda value, limit: value >= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "minLength": lambda value, limit: len(value) >= limit,
    "maxLength": lambda value, limit: len(value) <= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "minProperties": lambda value, limit: len(value) >= limit,
    "pattern": lambda value, pattern: re.search(pattern, value) is not None,
}
APPLIES: dict[str, Any] = {
    "minLength": str, "maxLength": str, "pattern": str, "minItems": list, "maxItems": list, "minProperties": dict,
}  # fmt: skip


def violations(value: Any, schema: Any, root: Any, at: str = "$") -> Iterator[str]:
    """Where the value is not what the schema says."""
    if isinstance(schema, bool):
        if not schema:
            yield f"{at}: nothing is allowed"
        return
    for word, said in schema.items():
        if word in SAID_ONLY or word in ("then", "else"):
            continue
        if word == "$ref":
            yield from violations(value, pointed(root, said), root, at)
        elif word in COMPARED:
            kind = APPLIES.get(word, (int, float))
            if isinstance(value, kind) and not isinstance(value, bool) and not COMPARED[word](value, said):
                yield f"{at}: {value!r} breaks {word} {said!r}"
        elif word not in RULES:
            raise AssertionError(f"{at}: keyword '{word}' is not known to this checker")
        else:
            yield from RULES[word](value, said, schema, root, at)


def pointed(root: Any, ref: str) -> Any:
    assert ref.startswith("#/"), ref
    for step in ref[2:].split("/"):
        root = root[step]
    return root


def holds(value: Any, schema: Any, root: Any) -> bool:
    return not any(True for _ in violations(value, schema, root))


def _type(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    kinds = said if isinstance(said, list) else [said]
    if not any(isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in kinds):
        yield f"{at}: {value!r} is no {' or '.join(kinds)}"


def _enum(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    if value not in said:
        yield f"{at}: {value!r} is none of {said}"


def _const(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    if value != said:
        yield f"{at}: {value!r} is not {said!r}"


def _any_of(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    if not any(holds(value, option, root) for option in said):
        yield f"{at}: {value!r} is nothing that is allowed"


def _all_of(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    for part in said:
        yield from violations(value, part, root, at)


def _if(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    yield from violations(value, schema.get("then" if holds(value, said, root) else "else", True), root, at)


def _required(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    yield from (f"{at}: '{name}' is missing" for name in said if isinstance(value, dict) and name not in value)


def _properties(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    for name, part in said.items():
        if isinstance(value, dict) and name in value:
            yield from violations(value[name], part, root, f"{at}.{name}")


def _additional(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    for name in value if isinstance(value, dict) else ():
        if name not in schema.get("properties", {}):
            yield from violations(value[name], said, root, f"{at}.{name}")


def _items(value: Any, said: Any, schema: Any, root: Any, at: str) -> Iterator[str]:
    for index, item in enumerate(value if isinstance(value, list) else ()):
        yield from violations(item, said, root, f"{at}[{index}]")


RULES = {
    "type": _type, "enum": _enum, "const": _const, "anyOf": _any_of, "allOf": _all_of, "if": _if, "required": _required,
    "properties": _properties, "additionalProperties": _additional, "items": _items,
}  # fmt: skip
