"""Discovery plugins say where the list of endpoints comes from: the path of a file, and whether the picker follows its changes.

`workers/supervisor/endpoints/endpoints_file.py` reads the file.
"""

from typing import Annotated, ClassVar

import msgspec

from epp.plugin import Discovery, plugin


@plugin("file-discovery")
class FileDiscovery(Discovery):
    """Reads the endpoints from a YAML or JSON file.

    `clusters`: whether the endpoints in the file are clusters, with labels that say where their metrics pages are.
    """

    clusters: ClassVar[bool] = False

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        """The file with the endpoints.

        path: The path of the file.
        watch_file: Follow changes of the file.
        """

        path: Annotated[str, msgspec.Meta(min_length=1)]
        watch_file: bool = False

    def __init__(self, name: str, params: "FileDiscovery.Params") -> None:
        super().__init__(name, params)
        self.path = params.path
        self.watch = params.watch_file


@plugin("multicluster-file-discovery")
class MulticlusterFileDiscovery(FileDiscovery):
    """Reads clusters from a YAML or JSON file: the address of an endpoint is that of a cluster's gateway.

    If the metrics page is not at the gateway, the endpoint's label `metricsAddress` names its host. The label `metricsPort` is the page's
    port; without the label, the page has the endpoint's port.
    """

    clusters = True
