"""Disaggregated serving: the role label of endpoints, the roles that compute prompts, and the headers of the routing sidecar.

The headers steer the sidecar of a model server. Only the picker may set them: a client that could set one of them could make the sidecar
call any server. So every plugin that owns a header sets or removes it.
"""

from typing import Final

ROLE_LABEL: Final = "llm-d.ai/role"
PREFILL_ROLES: Final = frozenset(("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"))


PREFILLER = "x-prefiller-host-port"  # the server that computes the prompt
ENCODERS = "x-encoder-hosts-ports"  # the servers that encode media, separated by commas
RANK_HEADER = "x-data-parallel-host-port"  # the rank of a data-parallel server
KV_SOURCE = "x-kv-cache-source-host-port"  # the server that the prompt's KV cache is copied from
STEERING = (PREFILLER, ENCODERS, RANK_HEADER, KV_SOURCE)
