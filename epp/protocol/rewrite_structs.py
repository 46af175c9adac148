"""Declares the one member of a body, `model`, that is read to rename the model. Not compiled: msgspec reads annotations at run time."""

from typing import Final

import msgspec


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


named: Final = msgspec.json.Decoder(_Named)
