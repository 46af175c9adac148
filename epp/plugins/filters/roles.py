"""Keep the endpoints that serve one stage of disaggregated inference, by their role label.

    role                     encode   prefill   decode
    encode                     x
    encode-prefill             x         x
    encode-prefill-decode      x         x         x
    prefill                              x
    prefill-decode                       x         x
    both (older name)                    x         x
    decode                                         x
    no label                                       x

The three filters are in one file because they are three columns of one table.
"""

from collections.abc import Mapping
from typing import ClassVar

from epp.endpoints.label_selectors import PREFILL_ROLES, ROLE_LABEL
from epp.plugin import plugin
from epp.plugins.filters import LabelFilter


class RoleFilter(LabelFilter):
    """Base class of filters that decide by the role label alone; it has no parameters."""

    roles: ClassVar[frozenset[str]]
    unlabelled: ClassVar[bool] = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        role = labels.get(ROLE_LABEL)
        return self.unlabelled if role is None else role in self.roles


@plugin("decode-filter")
class DecodeFilter(RoleFilter):
    """Keeps endpoints with the role decode, prefill-decode, both or encode-prefill-decode, and endpoints without a role."""

    roles = frozenset(("decode", "prefill-decode", "both", "encode-prefill-decode"))
    unlabelled = True


@plugin("prefill-filter")
class PrefillFilter(RoleFilter):
    """Keeps endpoints with the role prefill, encode-prefill, prefill-decode, both or encode-prefill-decode."""

    roles = PREFILL_ROLES


@plugin("encode-filter")
class EncodeFilter(RoleFilter):
    """Keeps endpoints with the role encode, encode-prefill or encode-prefill-decode."""

    roles = frozenset(("encode", "encode-prefill", "encode-prefill-decode"))
