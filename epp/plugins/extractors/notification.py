"""Accepts the sources that tell plugins of the reference picker which endpoints and pods come and go. In this picker, they do nothing."""

from typing import Annotated

import msgspec

from epp.plugin import DataSource, plugin

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Notification(DataSource):
    """Base class of the sources that scrape nothing."""

    scrapes = False


@plugin("endpoint-notification-source")
class EndpointNotification(Notification):
    """Accepted for configurations of the reference picker. It does nothing: plugins see all endpoints without it."""


class ObjectKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The kind of objects to watch.

    version: The version of the API, such as v1.
    kind: The kind, such as Pod.
    group: The group of the API; empty for the core group.
    """

    version: Name
    kind: Name
    group: str = ""


@plugin("k8s-notification-source")
class ObjectNotification(Notification):
    """Accepted for configurations of the reference picker. It watches nothing: plugins that need pods read the endpoints of the pool."""

    Params = ObjectKind

    def __init__(self, name: str, params: ObjectKind) -> None:
        super().__init__(name, params)
        if (params.group, params.version, params.kind) != ("", "v1", "Pod"):
            self.without_effect = [f"kind: {params.kind} is not watched; plugins get the pods of the pool only"]
