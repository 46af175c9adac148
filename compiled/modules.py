"""Lists the compiled modules and the C sources of the kernels. This is the only such list.

Compiled are the modules that run for each request, and those that the kv-events process runs for each message. They are compiled together,
so a call from one module to another is a call in C. `LEFT_OUT` has the modules of the request path that are not compiled, with the reason.
"""

from collections.abc import Mapping
from typing import Final

_PATHS = """
    compiled/calls compiled/outlook
    epp/candidates epp/data
    epp/decision/admission epp/decision/decide epp/decision/decision epp/decision/pipeline epp/decision/profile
    epp/decision/response_phase
    epp/endpoints/failing epp/endpoints/pressure epp/endpoints/server_blocks
    epp/flow/controller epp/flow/gate epp/flow/rate epp/flow/registry
    epp/learning/choice epp/learning/costs epp/learning/least_squares epp/learning/model epp/learning/samples
    epp/learning/speed epp/learning/waits
    epp/metrics/label_caps
    epp/plugins/deciders/predicted epp/plugins/deciders/prefix_based
    epp/plugins/extractors/_core_page epp/plugins/extractors/_info_metrics epp/plugins/extractors/_ranks
    epp/plugins/fairness/_token_costs epp/plugins/fairness/token_weighted
    epp/plugins/filters/__init__
    epp/plugins/parsers/_canonical epp/plugins/parsers/_extents epp/plugins/parsers/_openai epp/plugins/parsers/_plain_prompts
    epp/plugins/parsers/_reader
    epp/plugins/parsers/openai epp/plugins/parsers/vllm_grpc
    epp/plugins/pickers/max_score
    epp/plugins/producers/_held_tokens epp/plugins/producers/_predictions epp/plugins/producers/_sent_prompts
    epp/plugins/producers/approx_prefix epp/plugins/producers/inflight epp/plugins/producers/learned_latency
    epp/plugins/profiles/__init__ epp/plugins/profiles/_stages epp/plugins/profiles/disagg
    epp/plugins/saturation/utilization
    epp/plugins/scorers/active_requests epp/plugins/scorers/learned_latency
    epp/plugins/scorers/prefix_cache epp/plugins/scorers/queue_depth epp/plugins/scorers/reported
    epp/plugins/scorers/token_load
    epp/plugins/sessions/_affinity epp/plugins/sessions/pinned
    epp/plugins/usage_limits/static
    epp/points/guard
    epp/prefix/blocks epp/prefix/held epp/prefix/kv_events epp/prefix/match epp/prefix/prediction epp/prefix/updates
    epp/protocol/exposition epp/protocol/grpc_frames epp/protocol/inflate epp/protocol/refusals epp/protocol/rewrite
    epp/protocol/stream epp/protocol/usage epp/protocol/usage_bounds epp/protocol/wire
    epp/protocol/codec/answers epp/protocol/codec/bodies epp/protocol/codec/envelope epp/protocol/codec/fields
    epp/protocol/codec/header_map epp/protocol/codec/structs
    epp/recording/keys epp/recording/sample
    epp/request/client_headers epp/request/intake epp/request/paths epp/request/renaming epp/request/request
    epp/request/tokens
    shm/answers shm/flow_lanes shm/held_reader shm/held_writer shm/histograms shm/index_capacity
    shm/index_tiers shm/lanes shm/layout shm/link_table shm/prefills shm/prefix_index shm/prefix_reader shm/prefix_writer
    shm/prompt_starts shm/remote_lane shm/seqlock shm/series shm/series_reader shm/series_rows shm/stream_marks shm/table
    workers/endpoints/freshness workers/endpoints/http_answer workers/endpoints/http_client workers/endpoints/index_limits
    workers/endpoints/pace workers/endpoints/scrape workers/endpoints/scrape_results workers/endpoints/target
    workers/endpoints/wheel
    workers/endpoints/replicas/byte_stream workers/endpoints/replicas/connection workers/endpoints/replicas/exchange
    workers/endpoints/replicas/joining workers/endpoints/replicas/others workers/endpoints/replicas/pace
    workers/endpoints/replicas/places workers/endpoints/replicas/rates workers/endpoints/replicas/reading
    workers/endpoints/replicas/replies workers/endpoints/replicas/taught workers/endpoints/replicas/waiting
    workers/extproc/answer_counts workers/extproc/app workers/extproc/health workers/extproc/pipelines workers/extproc/pool
    workers/extproc/request_phase workers/extproc/reservation workers/extproc/response_phase workers/extproc/shedding
    workers/extproc/shell workers/extproc/stream workers/extproc/tried_stream
    workers/flow/flow_control workers/flow/metrics workers/flow/peers workers/flow/probe
    workers/kv_events/followed workers/kv_events/holdings workers/kv_events/sockets workers/kv_events/stream
    workers/shared/bus workers/shared/decisions workers/shared/query_of_death
    workers/telemetry/cache_prediction workers/telemetry/call_timing workers/telemetry/recorder
    workers/telemetry/request_metrics workers/telemetry/request_telemetry workers/telemetry/stream_metrics
    workers/telemetry/trace_context workers/telemetry/tracing
    workers/transport/abuse workers/transport/answer_blocks workers/transport/control_frames workers/transport/deadlines
    workers/transport/frames
    workers/transport/header_blocks workers/transport/headers workers/transport/http2 workers/transport/interface
    workers/transport/link workers/transport/native workers/transport/output workers/transport/pieces workers/transport/room
    workers/transport/session workers/transport/stream workers/transport/timeouts workers/transport/turn
    workers/transport/wrong_protocol
    workers/worker/adoption workers/worker/learning workers/worker/plugin_handles
    workers/worker/rewrites
"""
PATHS: Final = tuple(f"{path}.py" for path in _PATHS.split())

ENTRY: Final = "compiled.entry"  # the module in the library that makes the other modules
KERNELS: Final = "compiled.kernels.native"  # the module that the C sources make
KERNEL_SOURCES: Final = tuple(
    f"compiled/kernels/{name}.c"
    for name in (
        "capacity",
        "chain",
        "frames",
        "held",
        "histograms",
        "index",
        "json",
        "lanes",
        "latency",
        "links",
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
    "shm.documents": "the version of a document is read once per snapshot of the endpoints, at most once per millisecond",
    "workers.shared.documents": "the same; and it defines msgspec structs",
    "workers.worker.plugin_work": "timers of plugins: inflight-load-producer sets at most one per 10 ms, for all requests together",
    "workers.worker.services:WorkerServices.after": "the same",
    "workers.worker.setup:Parts.record": "called only until the supervisor records: for some milliseconds of a start",
}
