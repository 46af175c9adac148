"""Says how long a server works on one prompt, while other prompts wait for it.

    prompt seconds = uncached prompt tokens of an answer * the model's time per token that others wait for

Where prompts do not wait for each other, the model has learned that a token ahead costs next to nothing, and the prompt seconds are near
0. Such a server is limited by the places in its batch (`epp.learning.replicas_needed`).
"""

from typing import Final

from epp.learning.model import REST, THOUSAND, UNCACHED, LatencyModel

ANSWERS: Final = 10_000  # the mean is over about so many answers, because prompts differ much in length


class PromptTime:
    """Follows the uncached prompt tokens of answers. `tokens`: the mean per answer; 0 before the first answer."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self._answers = 0

    def add(self, tokens: float) -> None:
        """Takes the tokens that the server has computed for one answer."""
        self._answers = min(self._answers + 1, ANSWERS)
        self.tokens += (tokens - self.tokens) / self._answers

    def seconds(self, model: LatencyModel) -> float:
        """Returns the mean seconds per prompt at a server of the pool's mean speed."""
        theta = model.first.theta
        return self.tokens / THOUSAND * min(theta[UNCACHED], theta[REST])
