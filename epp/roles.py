"""The role label of endpoints in disaggregated serving, and the roles that compute prompts."""

from typing import Final

ROLE_LABEL: Final = "llm-d.ai/role"
PREFILL_ROLES: Final = frozenset(("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"))
