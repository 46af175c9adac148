"""Published formulas that choose a server, each as a function from a prompt and the state of the servers to costs; the lowest wins.

The numbers are those of the publications. `BLOCK` is the block size of formulas that count in blocks.
"""

from collections.abc import Callable, Sequence

import xxhash

from tests.bench.routing_ledger import FIRST_RATE, Prompt, Server

BLOCK = 16
AFFINE_HIT = 0.8
AFFINE_RATE, AFFINE_S = 15_928.0, 18.0
KV_WEIGHT_S = 0.15
KV_MOST = 0.99
OBJECTIVE_S, OBJECTIVE_S_PER_TOKEN = 1.0, 62.5e-6
CHOSEN = -1.0  # below every other cost

Costs = Sequence[float]


def own(prompt: Prompt, server: Server) -> int:
    """Returns the tokens that the server would have to compute for this prompt: at least one, as the last token is always computed."""
    return max(1, prompt.tokens - server.hit)


def least_requests(prompt: Prompt, servers: Sequence[Server]) -> Costs:
    """Fewest requests in flight."""
    return [server.inflight for server in servers]


def token_aware(prompt: Prompt, servers: Sequence[Server]) -> Costs:
    """The token-aware default of llm-d: fewest tokens in flight, among those that hold 80 % of the prompt, if any.

    If even the best of these has 18 s more of tokens in flight than the best other one, all take part.
    """
    loads = [server.pending + own(prompt, server) for server in servers]
    affine = [server.hit >= AFFINE_HIT * prompt.tokens for server in servers]
    inside = [server.pending for server, is_affine in zip(servers, affine, strict=True) if is_affine]
    outside = [server.pending for server, is_affine in zip(servers, affine, strict=True) if not is_affine]
    if not inside or (outside and min(inside) - min(outside) > AFFINE_S * AFFINE_RATE):
        return loads
    return [load if is_affine else float("inf") for load, is_affine in zip(loads, affine, strict=True)]


def dynamo(hit_weight: float, prefill_weight: float, request_weight: float) -> Callable[[Prompt, Sequence[Server]], Costs]:
    """Dynamo's selector, in blocks: prefill that remains, blocks of the requests in flight, and these requests."""

    def cost(prompt: Prompt, server: Server) -> float:
        prefill = (server.pending + prompt.tokens - hit_weight * server.hit) / BLOCK
        return prefill_weight * max(0.0, prefill) + server.held / BLOCK + request_weight * server.inflight

    return lambda prompt, servers: [cost(prompt, server) for server in servers]


def least_load(prompt: Prompt, servers: Sequence[Server]) -> Costs:
    """The policy `least_load` of smg, in seconds: queued work by throughput, and a penalty for full KV caches."""
    return [(server.queued + server.since) / server.rate + KV_WEIGHT_S * _odds(min(server.kv, KV_MOST)) for server in servers]


def _odds(share: float) -> float:
    return share / (1.0 - share)


def lmetric(prompt: Prompt, servers: Sequence[Server]) -> Costs:
    """LMetric (arXiv 2603.15202): tokens to compute times the size of the batch with this request."""
    return [own(prompt, server) * (server.inflight + 1) for server in servers]


def smetric(prompt: Prompt, servers: Sequence[Server]) -> Costs:
    """SMetric (arXiv 2607.08565): a prompt that nobody holds balances work times requests; another one stays with its longest hit.

    It leaves if this server misses the objective of the prompt and another server meets it.
    """
    balanced = [(server.pending + own(prompt, server)) * server.inflight for server in servers]
    longest = max(server.hit for server in servers)
    if not longest:
        return balanced
    fits = [_meets(prompt, server) for server in servers]
    stays = [server.hit == longest and (fit or not any(fits)) for server, fit in zip(servers, fits, strict=True)]
    if any(stays):
        return [CHOSEN if stay else cost for stay, cost in zip(stays, balanced, strict=True)]
    return [cost if fit else float("inf") for fit, cost in zip(fits, balanced, strict=True)]


def _meets(prompt: Prompt, server: Server) -> bool:
    """Returns whether the server is expected to meet the objective: 1 s, and 62.5 ms more for 1,000 tokens."""
    return (server.pending + own(prompt, server)) / server.rate <= OBJECTIVE_S + OBJECTIVE_S_PER_TOKEN * prompt.tokens


def dual_map(prompt: Prompt, servers: Sequence[Server]) -> Costs:
    """DualMap (arXiv 2602.06502): two hashes of the prefix name two servers; the one with the longer hit is chosen.

    If it misses the objective of the prompt, or the hits are equal, the one with less work is chosen.
    """
    ranked = sorted(servers, key=lambda server: xxhash.xxh3_64_intdigest(server.id.to_bytes(8, "little"), prompt.key))
    named = ranked[:2]
    best = max(named, key=lambda server: server.hit)
    if not _meets(prompt, best) or len({server.hit for server in named}) == 1:
        best = min(named, key=lambda server: server.pending + own(prompt, server))
    return [CHOSEN if server is best else 0.0 for server in servers]


def lbgr(prompt: Prompt, servers: Sequence[Server]) -> Costs:
    """LBGR (arXiv 2601.18999), in seconds: tokens to compute, tokens ahead, and a bias learned per server."""
    return [(own(prompt, server) + server.pending) / FIRST_RATE + server.bias_s for server in servers]


FORMULAS = {
    "least requests": least_requests,
    "llm-d token-aware": token_aware,
    "Dynamo": dynamo(1.0, 1.0, 0.0),
    "Dynamo, agentic": dynamo(2.0, 4.0, 64.0),
    "smg least_load": least_load,
    "LMetric": lmetric,
    "SMetric": smetric,
    "DualMap": dual_map,
    "LBGR": lbgr,
}
