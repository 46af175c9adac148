"""Endpoints from a file: which one, and whether changes are followed.

The file itself is read by `workers/discovery.py`.
"""

from typing import Annotated

import msgspec

from epp.plugin import Discovery, plugin


@plugin("file-discovery")
class FileDiscovery(Discovery):
    """A YAML or JSON list of endpoints."""

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        path: Annotated[str, msgspec.Meta(min_length=1)]
        watch_file: bool = False

    def __init__(self, name: str, params: "FileDiscovery.Params") -> None:
        super().__init__(name, params)
        self.path = params.path
        self.watch = params.watch_file
