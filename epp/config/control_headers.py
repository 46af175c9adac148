"""The headers with which a request can steer the picker or a model server, and what a client can do if they are trusted.

CONTROL_HEADERS is the only list of these headers. A gateway at the edge must remove them all from outside requests before one of its own
filters sets any. The shipped configurations (`deploy/`) do so, and tests compare these files with the list.
"""

from collections.abc import Collection, Mapping
from typing import Final

from epp.config.findings import WHOLE, ConfigNote
from epp.protocol.codec import DESTINATION, NEVER_PASSED
from epp.request.client_headers import DEBUG_GROUP, GATEWAY, GROUPS, STEERING

FAIRNESS: Final = "fairness"
TARGET_HEADERS: Final = (DESTINATION, *NEVER_PASSED)  # headers that name the servers of a request, or restrict the choice of servers
CONTROL_HEADERS: Final = (*TARGET_HEADERS, *STEERING, *(name for names in GROUPS.values() for name in names))
# Group of --trust-client-headers -> what a client can do with the headers of this group.
POWERS: Final[Mapping[str, str]] = {
    FAIRNESS: "queue as another tenant, or as many tenants",
    "objective": "take the priority of any objective, and the place of other requests",
    "ttl": "end the wait of its own requests sooner",
    "slo": "claim urgency where a plugin reads it",
    "model": "get another model than its body names, past a gateway that authorises by the body",
    "if-available": "learn whether a server has cached the beginning of another tenant's prompt",
    DEBUG_GROUP: "get a receipt with each response, which only the picker can open",
}
FIX: Final = (
    "if the gateway removes these headers from outside (docs/gateways.md), start the picker with --trust-client-headers=gateway; "
    "else do not trust the groups"
)


def exposed(trusted: Collection[str]) -> list[str]:
    """Returns for each trusted group what a client can do with it. `trusted`: the groups in `Options.trust_client_headers`."""
    return [f"{power} ({group})" for group, power in POWERS.items() if group in trusted]


def header_notes(trusted: Collection[str], source: str, *, tenants: bool = False) -> list[ConfigNote]:
    """Returns a note of what clients can do. Returns no note if the gateway removes the headers. `source` names the checked file.

    `tenants`: whether tenants are configured. If so, no client can name its own fairness id.
    """
    if GATEWAY in trusted or not (powers := exposed([group for group in trusted if not (tenants and group == FAIRNESS)])):
        return []
    text = f"headers that --trust-client-headers trusts let a client {'; '.join(powers)}"
    return [ConfigNote(source, WHOLE.line, WHOLE.column, "client-headers", text, FIX)]
