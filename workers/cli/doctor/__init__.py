"""`epp doctor`: finds what commonly goes wrong around a picker. Each check returns findings with evidence and a fix.

command   the options, the order of the checks, the report and the exit code
running   the running picker: the findings of its state, as the page's Health view shows them
servers   the model servers, asked directly: clock, prefix caching, time of the metrics page
gateway   the configuration of Envoy: modes of ext_proc, limits of HTTP/2, time-outs, TLS, clients' headers; pure
tls       the certificate of the ext_proc port: names and issuer
access    what the Kubernetes API server lets this service account do

`workers/cli/kv_probe.py` has `epp doctor --kv-events`.
"""
