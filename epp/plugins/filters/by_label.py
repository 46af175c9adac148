"""Keep endpoints by the value of one label; the older way to say it."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from epp.plugin import plugin
from epp.plugins.filters import LabelFilter


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Some value, or none at all, must be allowed."""

    label: Annotated[str, msgspec.Meta(min_length=1)]
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False


@plugin("by-label")
class ByLabel(LabelFilter):
    """Keeps an endpoint whose label has a listed value, or, if allowed, that has no such label.

    As in the field, the empty text as a listed value allows no label too.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        if not (params.valid_values or params.allows_no_label):
            raise ValueError("validValues: is empty, and allowsNoLabel is false: no endpoint could pass")
        self._label = params.label
        self._values = frozenset(params.valid_values)
        self._unlabelled = params.allows_no_label

    def matches(self, labels: Mapping[str, str]) -> bool:
        return labels.get(self._label, "") in self._values or (self._unlabelled and self._label not in labels)
