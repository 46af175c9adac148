"""Decodes JSON objects into the fields of a msgspec Struct, in two ways with equal results.

The kernels in C find the members that the Struct names, and skip all other bytes several times as fast as msgspec: a prompt of 400 KB in
30 us instead of 300. msgspec decodes only the values that are not `Raw`. If the kernels are not built, or cannot read a text, msgspec
decodes the whole text. So msgspec alone decides which texts are errors.

A `Raw` field then holds JSON as bytes or as a view of the text, which the functions for `Raw` read in the same way.
"""

from collections.abc import Callable
from typing import Any, get_args, get_origin

import msgspec

from compiled import calls
from epp.errors import UNREADABLE
from epp.plugins.parsers._structs import EMPTY, Raw


class Reader:
    """Decodes the objects of one type, `kind`: a Struct whose fields have defaults."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self._kind: Any = kind
        self._whole: Any = msgspec.json.Decoder(kind).decode
        fields = msgspec.structs.fields(kind)
        self._names = tuple(field.encode_name.encode() for field in fields)
        self._defaults: list[Any] = [field.default for field in fields]
        self._decoders = [_decoder(field.type) for field in fields]

    def decode(self, text: bytes | memoryview) -> Any:
        """Returns the decoded object. Raises one of UNREADABLE."""
        found = calls.members(text, self._names, EMPTY)
        if found is not None:
            try:
                return self._decoded(found)
            except UNREADABLE:
                pass  # msgspec names the field
        return self._whole(text)

    def _decoded(self, found: tuple[Any, ...]) -> Any:
        values, decoders = self._defaults.copy(), self._decoders
        missing = EMPTY  # a local name, because compiled code looks up the name of another module at each use
        for at, raw in enumerate(found):
            if raw is not missing:
                decode = decoders[at]
                values[at] = raw if decode is None else decode(raw)
        return self._kind(*values)


class ListReader:
    """Decodes arrays of objects of one type, `kind`: a Struct whose fields are all `Raw`."""

    def __init__(self, kind: type[msgspec.Struct], whole: Callable[[Any], Any]) -> None:
        """`whole`: decodes an array that the kernels cannot read, or a value that is no array."""
        self._kind: Any = kind
        self._whole: Any = whole
        self._names = tuple(field.encode_name.encode() for field in msgspec.structs.fields(kind))

    def decode(self, text: bytes | memoryview) -> Any:
        """Returns the decoded objects. Raises one of UNREADABLE."""
        objects = self._listed(text)
        return self._whole(text) if objects is None else objects

    def _listed(self, text: bytes | memoryview) -> list[Any] | None:
        texts = calls.items(text)
        if texts is None:
            return None
        objects = []
        for item in texts:
            found = calls.members(item, self._names, EMPTY)
            if found is None:
                return None
            objects.append(self._kind(*found))
        return objects


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Returns the function that decodes the values of a field of this type, or None if the field keeps the JSON text."""
    if kind is Raw:
        return None
    whole = msgspec.json.Decoder(kind).decode
    listed = [get_args(each)[0] for each in (kind, *get_args(kind)) if get_origin(each) is list]
    if listed and all(field.type is Raw for field in msgspec.structs.fields(listed[0])):
        return ListReader(listed[0], whole).decode
    return whole
