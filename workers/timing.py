"""Whose plugin calls are timed: of few requests everyone's, of many one in eight, which then counts as eight.

    turn of a request    left over from a sample: not timed | some left of this beat: timed | else: timed, for itself and seven more

To time all calls of a short request costs 7 us, of one in eight 1 us. What is counted is never more than SHARE - 1 requests ahead
of what came, and right in the mean where a plugin is not called for every request. A request keeps its form to its end. Parsers,
scorers and all others are timed together: the form is a whole pipeline.
"""

from typing import Final

from epp.guard import within
from epp.instrument import Wrap
from epp.pipeline import Pipeline
from workers.services import CallTimers

SHARE: Final = 8
EXACT: Final = 8  # requests that are all timed, from one beat of the worker to the next


class Timing:
    """One worker's. `guarded` is what stands around every call besides (`epp.instrument.bare`: nothing)."""

    def __init__(self, timers: CallTimers, guarded: Wrap, pipeline: Pipeline) -> None:
        """`pipeline` has both around its calls."""
        self._timers = timers
        self._sampled = within(guarded, timers.standing_for(SHARE))
        self._untimed = guarded
        self._exact = EXACT
        self._left = 0  # of those that the last sample stands for
        self.use(pipeline)

    def use(self, pipeline: Pipeline) -> None:
        """Requests are decided by this one from now on; its calls are timed."""
        self._forms = (pipeline, pipeline.wrapped(self._sampled), pipeline.wrapped(self._untimed))

    def turn(self) -> Pipeline:
        """The form for the next request."""
        if self._left:
            self._left -= 1
            return self._forms[2]
        if self._exact:
            self._exact -= 1
            return self._forms[0]
        self._left = SHARE - 1
        return self._forms[1]

    def beat(self) -> None:
        """Stores what was timed; a few requests more are timed one by one."""
        self._exact = EXACT
        self._timers.store()
