"""Holds what the latency model knows of one endpoint."""

from typing import Final

from epp.learning.speed import Speed
from epp.metrics import buckets

ERROR_FIRST: Final = 0.5
ERROR_BOUNDS: Final[tuple[float, ...]] = buckets.RELATIVE_ERROR


class EndpointModel:
    """Holds what is known of one endpoint, which `slot` and `generation` identify.

    `speed`, `token_speed`: how slow the endpoint is with prompts and with output tokens. `LatencyModel` divides them by the means of all
    endpoints. `learned_at`: the time of the last first token. `drift_at`: the pool's drift at that time. `error`: the mean relative error
    of the endpoint's last predictions. `batch`: the largest batch. `full`: scrapes with waiting requests at that batch size. `errors`:
    number of observations for each range of relative errors; `ERROR_BOUNDS` separates the ranges. `error_sum`: the sum of these errors.
    `computed`: the prompt tokens that the endpoint has computed for first tokens that were observed.
    """

    __slots__ = (
        "batch", "computed", "drift_at", "error", "error_sum", "errors", "full", "generation", "learned_at", "slot", "speed", "token_speed",
    )  # fmt: skip

    def __init__(self, slot: int, generation: int) -> None:
        self.slot = slot
        self.generation = generation
        self.speed = Speed()
        self.token_speed = Speed()
        self.learned_at = 0.0
        self.drift_at = 0.0
        self.error = ERROR_FIRST
        self.batch = 0.0
        self.full = 0
        self.errors = [0] * (len(ERROR_BOUNDS) + 1)
        self.error_sum = 0.0
        self.computed = 0.0

    @property
    def samples(self) -> int:
        """Returns how many first tokens were observed."""
        return self.speed.samples
