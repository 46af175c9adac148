"""Metric families with label values from requests: one `Group` per set of labels.

Code that counts names a value by its group in this module, and a histogram of `REQUEST_FIGURES` by its index (DURATION and the following
names). Counters that plugins declare get groups, too (`epp.metrics.catalogue.plugin_groups`).
"""

from epp.metrics import PLUGIN_LABELS, Group, Labelled, buckets, counter, gauge, histogram


def _histogram(name: str, help: str, bounds: tuple[float, ...]) -> Labelled:
    return Labelled(histogram(name, help, bounds))


REQUEST_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")
REQUEST_TOTAL = counter("request_total", "Inference requests that got an endpoint.")
REQUEST_RUNNING = gauge("request_running", "Requests that got an endpoint and have not ended.")
REQUEST_ERRORS = counter("request_error_total", "Requests that failed, in the picker or at the model server.")
SCHEDULER_ATTEMPTS = counter("scheduler_attempts_total", "Decisions, by outcome and endpoint.")
TIME_TO_FIRST = histogram("request_ttft_seconds", "Time from the request to the first piece of the response's body.", buckets.FIRST_TOKEN_S)

(
    DURATION, REQUEST_BYTES, RESPONSE_BYTES, INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, PER_OUTPUT_TOKEN,
    TTFT_STREAMING, TTFT_WHOLE, STREAMING_PER_TOKEN, BETWEEN_CHUNKS,
) = range(11)  # fmt: skip
REQUEST = Group("request", REQUEST_LABELS, gauges=(REQUEST_RUNNING,), counters=(REQUEST_TOTAL,), blocks=512, page_bytes=500_000, ages=True)
REQUEST_FIGURES = Group(
    "request_figures",
    REQUEST_LABELS,
    histograms=(
        _histogram("request_duration_seconds", "Time from the request to the end of its response.", buckets.LATENCY_S),
        _histogram("request_size_bytes", "Bytes of the request's body.", buckets.REQUEST_BYTES),
        _histogram("response_size_bytes", "Bytes of the response's body.", buckets.RESPONSE_BYTES),
        _histogram("request_input_tokens", "Prompt tokens, as the model server reports them.", buckets.INPUT_TOKENS),
        _histogram("request_output_tokens", "Output tokens, as the model server reports them.", buckets.OUTPUT_TOKENS),
        _histogram("request_cached_tokens", "Cached prompt tokens, as the model server reports them.", buckets.INPUT_TOKENS),
        _histogram("request_ntpot_seconds", "Duration of the request per output token.", buckets.NORMALIZED_TOKEN_S),
        Labelled(TIME_TO_FIRST, "streaming", "true"),
        Labelled(TIME_TO_FIRST, "streaming", "false"),
        _histogram("request_streaming_tpot_seconds", "Time per output token after the first, of streamed responses.", buckets.TOKEN_S),
        _histogram("request_streaming_itl_seconds", "Time between two chunks of a streamed response's body.", buckets.CHUNK_GAP_S),
    ),
    blocks=128,
    page_bytes=4_200_000,
    ages=True,
)
ERROR = Group("error", (*REQUEST_LABELS, "error_code"), counters=(REQUEST_ERRORS,), page_bytes=250_000, ages=True)
ATTEMPTS = Group(
    "attempts",
    ("status", "target_model_name", "endpoint_name", "namespace", "port"),
    counters=(SCHEDULER_ATTEMPTS,),
    blocks=1024,
    page_bytes=700_000,
    ages=True,
)
PREDICTION_CHECKED = counter(
    "prefix_checked_requests_total", "Requests with cached prompt tokens both predicted by the picker and reported by the model server."
)
PREDICTION_UNREPORTED = counter(
    "prefix_unreported_requests_total", "Requests with a prediction, served by a model server that has never reported cached prompt tokens."
)
PREDICTION_MISSED = counter(
    "prefix_unreported_hits_total", "Unreported requests with more than a quarter of the prompt predicted to be cached."
)
PREDICTION_PROMPT_TOKENS = counter(
    "prefix_checked_prompt_tokens_total", "Prompt tokens of checked requests, as the model server reports them."
)
PREDICTED_TOKENS = counter(
    "prefix_predicted_tokens_total",
    "Prompt tokens of checked requests that the picker predicted to be cached: the predicted share of the reported prompt tokens.",
)
REPORTED_TOKENS = counter("prefix_reported_tokens_total", "Cached prompt tokens of checked requests, as the model server reports them.")
OVERPREDICTED_TOKENS = counter(
    "prefix_overpredicted_tokens_total", "Predicted minus reported cached tokens, over checked requests with more predicted."
)
UNDERPREDICTED_TOKENS = counter(
    "prefix_underpredicted_tokens_total", "Reported minus predicted cached tokens, over checked requests with more reported."
)
USAGE_BEYOND_BOUNDS = counter(
    "usage_beyond_bounds_total",
    "Answers whose model server reported more than twice the tokens that the request can have cost; the picker ignores the excess.",
)
SALT_IGNORED = counter(
    "salt_ignored_total", "Answers with cached prompt tokens although only other cache salts had sent this beginning before."
)
PREDICTION = Group(
    "prefix_prediction",
    ("endpoint_name", "namespace", "port"),
    counters=(
        PREDICTION_CHECKED,
        PREDICTION_UNREPORTED,
        PREDICTION_PROMPT_TOKENS,
        PREDICTED_TOKENS,
        REPORTED_TOKENS,
        OVERPREDICTED_TOKENS,
        UNDERPREDICTED_TOKENS,
        PREDICTION_MISSED,
        USAGE_BEYOND_BOUNDS,
        SALT_IGNORED,
    ),
    blocks=1024,
    ages=True,
)
SHADOW_DECISIONS = counter("shadow_decisions_total", "Decisions of shadow profiles, by whether they agree with the real decision.")
SHADOWS = Group("shadows", ("profile", "outcome"), counters=(SHADOW_DECISIONS,), blocks=64)
PEER_FAULTS = counter(
    "abuse_total", "Connections closed, or streams ended, because a peer of the ext_proc port exceeded a limit, by cause."
)
ABUSE = Group("abuse", ("cause",), counters=(PEER_FAULTS,), blocks=64, pooled=False)
PLUGIN_LEFT_OUT = gauge("plugin_left_out", "Whether the plugin is left out of the pipeline because it failed repeatedly.")
PLUGIN_FAULTS = counter("plugin_faults_total", "Exceptions of the plugin; each cost at most one request.")
PLUGIN_EXCLUSIONS = counter("plugin_exclusions_total", "How often the plugin was left out.")
ISOLATION = Group("isolation", PLUGIN_LABELS, gauges=(PLUGIN_LEFT_OUT,), counters=(PLUGIN_FAULTS, PLUGIN_EXCLUSIONS), blocks=256)
MODEL_REWRITE_DECISIONS = counter(
    "model_rewrite_decisions_total", "Requests with a model chosen by a rule, by the InferenceModelRewrite that has the rule."
)
MODEL_REWRITES = Group(
    "model_rewrites",
    ("model_rewrite_name", "model_name", "target_model"),
    counters=(MODEL_REWRITE_DECISIONS,),
    page_bytes=250_000,
    ages=True,
)
TRYOUT_REQUESTS = counter(
    "tryout_requests_total", "Requests that ended while a candidate configuration was tried, by the configuration that decided them."
)
TRYOUT_ERRORS = counter("tryout_errors_total", "Requests of tryout_requests_total that failed, in the picker or at the model server.")
TRYOUT_PROMPT_TOKENS = counter(
    "tryout_prompt_tokens_total", "Prompt tokens that model servers reported for requests of tryout_requests_total."
)
TRYOUT_CACHED_TOKENS = counter(
    "tryout_cached_prompt_tokens_total", "Prompt tokens that model servers reported as cached for requests of tryout_requests_total."
)
TRYOUT_FIRST_TOKEN, TRYOUT_DECISION = range(2)
TRYOUT = Group(
    "tryout",
    ("configuration",),
    counters=(TRYOUT_REQUESTS, TRYOUT_ERRORS, TRYOUT_PROMPT_TOKENS, TRYOUT_CACHED_TOKENS),
    histograms=(
        _histogram(
            "tryout_ttft_seconds",
            "Time from the request to the first piece of the response's body, while a candidate configuration is tried.",
            buckets.TRYOUT_FIRST_TOKEN_S,
        ),
        _histogram(
            "tryout_decision_seconds",
            "Time from the request's arrival to the picker's answer, while a candidate configuration is tried; for a shadow: duration of "
            "its decision.",
            buckets.DECISION_S,
        ),
    ),
    blocks=8,
)
TRYOUT_COMPARED = counter(
    "tryout_compared_total",
    "Decisions of a candidate configuration that is tried as a shadow, by whether they agree with the real decision.",
)
TRYOUT_SHADOWS = Group("tryout_shadows", ("outcome",), counters=(TRYOUT_COMPARED,), blocks=8)
TENANT_FIGURES = (
    counter("tenant_requests_total", "Requests of the tenant that got an endpoint."),
    counter("tenant_waited_total", "Requests of the tenant that waited in flow control before they got an endpoint."),
    counter("tenant_input_tokens_total", "Prompt tokens of the tenant, as model servers report them."),
    counter("tenant_cached_tokens_total", "Prompt tokens of the tenant that model servers report as cached."),
    counter("tenant_output_tokens_total", "Output tokens of the tenant, as model servers report them."),
    counter("tenant_over_budget_total", "Requests of the tenant that were refused because its budget was used up."),
    counter("tenant_refused_total", "Requests of the tenant that the picker refused, for whatever reason."),
)
# The gateway or a key determines the tenant, so no client can make a series.
TENANT = Group("tenant", ("fairness_id",), counters=TENANT_FIGURES, blocks=512, page_bytes=250_000, at_once=True, ages=True)
GROUPS = (REQUEST, REQUEST_FIGURES, ERROR, ATTEMPTS, PREDICTION, SHADOWS, ABUSE, ISOLATION, MODEL_REWRITES, TRYOUT, TRYOUT_SHADOWS, TENANT)
