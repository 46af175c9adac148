"""`LocalLearning`: what one process learns without shared memory."""

import pytest

from epp.learning.local import LocalLearning


@pytest.mark.parametrize("slot", [0, 64, 1000])
def test_a_prompt_behind_others_counts_at_any_slot(slot: int) -> None:
    learning = LocalLearning()
    learning.follows(slot, 100.0)
    learning.begins(slot, 5.0)
    learning.follows(slot, 30.0)
    learning.counts(slot, 2)
    learning.counts(slot, -1)
    assert learning.starts()[0, :, slot].tolist() == [5.0, 5.0, 30.0, 1.0]
