"""Keep endpoints by the value of one label. Deprecated: label-selector-filter can do more."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from epp.plugin import plugin
from epp.plugins.filters import LabelFilter


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which endpoints stay. List at least one value, or allow endpoints without the label.

    label: The label to compare.
    valid_values: Values of the label that an endpoint may have.
    allows_no_label: Keep endpoints without the label.
    """

    label: Annotated[str, msgspec.Meta(min_length=1)]
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False


@plugin("by-label")
class ByLabel(LabelFilter):
    """Keeps endpoints with one of the listed values of a label, and with `allowsNoLabel` those without the label.

    As in the reference picker, the empty string as a listed value also keeps endpoints without the label.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        if not (params.valid_values or params.allows_no_label):
            raise ValueError("validValues: is empty, and allowsNoLabel is false: no endpoint can pass; list a value")
        self._label = params.label
        self._values = frozenset(params.valid_values)
        self._unlabelled = params.allows_no_label

    def matches(self, labels: Mapping[str, str]) -> bool:
        return labels.get(self._label, "") in self._values or (self._unlabelled and self._label not in labels)
