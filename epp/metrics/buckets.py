"""Upper bounds of histogram buckets. Names that end in `_S` are in seconds, the others in tokens, bytes or ratios."""

from typing import Final

LATENCY_S: Final = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
    120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
)  # fmt: skip
FIRST_TOKEN_S: Final = LATENCY_S[: LATENCY_S.index(120.0) + 1]
# From 1 ms to 123 s. Each bound is 15 % above the previous one: fine enough to see that a p95 has moved by a quarter.
TRYOUT_FIRST_TOKEN_S: Final = tuple(float(f"{0.001 * 1.15**n:.4g}") for n in range(85))
TOKEN_S: Final = (
    0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0,
)  # fmt: skip
CHUNK_GAP_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)
NORMALIZED_TOKEN_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
DECISION_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
REQUEST_PROCESSING_S: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
RESPONSE_PROCESSING_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
STREAM_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
RATIO: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RELATIVE_ERROR: Final = (0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0)
HIT_BYTES: Final = (0.0, *(float(2**n) for n in range(4, 17)))
REQUEST_BYTES: Final = tuple(float(2**n) for n in range(6, 31))
OUTPUT_TOKENS: Final = (1.0, *(float(2**n) for n in range(3, 14)))
# 32778 instead of 32768: as in the reference picker, so that recording rules carry over.
RESPONSE_BYTES: Final = (*OUTPUT_TOKENS, 16384.0, 32778.0, 65536.0)
INPUT_TOKENS: Final = (*RESPONSE_BYTES, *(float(2**n) for n in range(17, 21)))
REVOCATION_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
QUEUE_S: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# The default buckets of Prometheus clients, continued down to microseconds.
LOOKUP_S: Final = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
