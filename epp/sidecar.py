"""Names the request headers that steer the routing sidecar of a model server. Only the picker may set them.

A client that could set one of them could make the sidecar call any server. So every plugin that owns a header sets or removes it.
"""

PREFILLER = "x-prefiller-host-port"  # the server that computes the prompt
ENCODERS = "x-encoder-hosts-ports"  # the servers that encode media, separated by commas
RANK_HEADER = "x-data-parallel-host-port"  # the rank of a data-parallel server
KV_SOURCE = "x-kv-cache-source-host-port"  # the server that the prompt's KV cache is copied from
STEERING = (PREFILLER, ENCODERS, RANK_HEADER, KV_SOURCE)
