"""The rows of an outlook (`compiled.kernels.latency_reference.first_tokens`), as constants that compiled code need not look up."""

from typing import Final

TIMES: Final = 0
COSTS: Final = 1
UNCACHED: Final = 2
AHEAD: Final = 3
ELAPSED: Final = 4
LOAD: Final = 5
MEMORY: Final = 6
