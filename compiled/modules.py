"""Lists the compiled modules and the C sources of the kernels. This is the only such list.

The list has the modules that run for each request, and those that the kv-events process runs for each message. They are compiled together,
so a call from one module to another is a call in C. `LEFT_OUT` has the modules of the request path that are not compiled, and says why.
"""

from collections.abc import Mapping
from typing import Final

_NAMES = """
    compiled: calls outlook
    epp: candidates data
    epp/decision: admission decide decision pipeline profile response_needs
    epp/endpoints: failing pressure server_blocks
    epp/flow: controller gate rate registry
    epp/learning: choice costs endpoint least_squares model samples speed waits
    epp/metrics: label_caps
    epp/plugins: usage_limits
    epp/plugins/deciders: predicted prefix_based
    epp/plugins/extractors: _core_page _info_metrics _ranks
    epp/plugins/fairness: _token_costs token_weighted
    epp/plugins/filters: __init__
    epp/plugins/parsers: _canonical _extents _openai _plain_prompts _reader openai vllm_grpc
    epp/plugins/pickers: max_score
    epp/plugins/producers: _held_tokens _predictions _sent_prompts approx_prefix inflight learned_latency
    epp/plugins/profiles: __init__ _stages disagg
    epp/plugins/saturation: utilization
    epp/plugins/scorers: active_requests learned_latency prefix_cache reported token_load
    epp/plugins/sessions: _affinity pinned
    epp/points: guard
    epp/prefix: blocks held kv_events match prediction updates
    epp/protocol: exposition grpc_frames inflate message_order refusals rewrite usage usage_bounds wire
    epp/protocol/codec: answers bodies envelope fields header_map structs
    epp/recording: keys sample
    epp/request: budget client_headers intake paths pool_choice renaming request tenant_keys tenants tokens
    shm: answers areas budgets flow_areas held_blocks histograms index_capacity layout link_table prefills prefix_index
    shm: prefix_writer remote_area seqlock series series_reader stream_positions table
    workers/replicas: budgets byte_stream connection endpoint_places exchange joining others pace pages reading replies
    workers/replicas: taught waiting
    workers/shared: bus decisions freshness index_limits query_of_death scrape_pace
    workers/supervisor/endpoints: http_answer http_client scrape wheel
    workers/supervisor/kv_events: event_stream followed holdings sockets
    workers/transport: abuse answer_blocks control_frames frames header_blocks headers http2 interface native output room
    workers/transport: sending server_stream session timeouts turn wrong_protocol
    workers/worker: adoption plugin_handles rewrites
    workers/worker/extproc: account answer_counts app budgets health pipelines pool pool_stream request_phase reservation
    workers/worker/extproc: response_phase shedding shell stream tried_stream turns
    workers/worker/flow: flow_control metrics peers probe
    workers/worker/telemetry: cache_prediction call_timing recorder request_metrics request_telemetry salt_watch
    workers/worker/telemetry: stream_metrics tenant_counts trace_context tracing
"""
PATHS: Final = tuple(
    f"{folder}/{name}.py"
    for folder, _, names in (line.strip().partition(":") for line in _NAMES.strip().splitlines())
    for name in names.split()
)

ENTRY: Final = "compiled.entry"  # the module in the library that makes the other modules
KERNELS: Final = "compiled.kernels.native"  # the module that the C sources make
KERNEL_SOURCES: Final = tuple(
    f"compiled/kernels/{name}.c"
    for name in (
        "areas",
        "capacity",
        "chain",
        "frames",
        "held",
        "histograms",
        "index",
        "json",
        "latency",
        "links",
        "loads",
        "module",
        "pages",
        "prefills",
        "replicas",
        "scores",
        "search",
        "steps",
    )
)
KERNEL_HEADERS: Final = ("compiled/kernels/arrays.h", "compiled/kernels/index.h")
ENTRY_SOURCE: Final = "compiled/entry.c"
SOURCES: Final = (*PATHS, *KERNEL_SOURCES, *KERNEL_HEADERS, ENTRY_SOURCE)  # the files that determine a build

# Modules (or module:function) that requests call although they are not compiled -> the reason.
LEFT_OUT: Final[Mapping[str, str]] = {
    "epp.points.flow:SaturationDetector.stage_saturation": "a base of foreign plugins; called at most once per millisecond",
    "shm.fence:no_fence": "an empty function in the place of a fence, on machines that keep the order; tests replace it",
    "shm.documents": "requests only compare versions, of objectives and rewrites if there can be any; 0.1 µs each",
    "workers.shared.documents": "its views are read once per snapshot of the endpoints; and it defines msgspec structs",
    "workers.worker.plugin_work": "timers of plugins: inflight-load-producer sets at most one per 10 ms, for all requests together",
    "workers.worker.services:WorkerServices.after": "the same",
    "workers.worker.setup:WorkerParts.record": "called only until the supervisor records: for some milliseconds of a start",
    "workers.worker.setup:Recording.look": "the same",
}
