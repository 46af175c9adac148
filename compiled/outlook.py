"""Numbers the rows of an outlook (`compiled.kernels.latency_reference.first_tokens`), and the cells of prompt starts.

The numbers are constants, so compiled code need not look them up.
"""

from typing import Final

TIMES: Final = 0
COSTS: Final = 1
UNCACHED: Final = 2
AHEAD: Final = 3
ELAPSED: Final = 4
LOAD: Final = 5
MEMORY: Final = 6

# The cells that a worker has for each slot in `shm.prefills.PromptStarts`. START: since when the endpoint works on the prompt at its front.
# SEEN: the start after which the worker has sent prompts there. LATE: the tokens of the prompts that the worker has sent there after SEEN.
# PROMPTS: how many of the worker's prompts are included in INFLIGHT_TOKENS of the endpoint.
START: Final = 0
SEEN: Final = 1
LATE: Final = 2
PROMPTS: Final = 3
CELLS: Final = 4
