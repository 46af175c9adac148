"""Declares what is read of a body to rename its model. Not compiled: msgspec reads annotations at run time."""

from typing import Final

import msgspec


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


named: Final = msgspec.json.Decoder(_Named)
