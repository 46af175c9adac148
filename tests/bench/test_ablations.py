"""Each row of the ablations leaves out what it names."""

from contextlib import ExitStack

import numpy as np
import pytest

from compiled.outlook import CELLS, START
from epp.learning.model import FirstToken, LatencyModel
from tests.bench.ablations import ROWS, WHOLE, Patches
from tests.modes import interpreted_only

NOW = 100.0


def predicted(patches: Patches) -> list[list[float]]:
    """Returns times and costs of three endpoints: a slow one, one with overdue prompts, and one with a full batch and a full KV cache."""
    model = LatencyModel()
    for slot in range(3):
        for _ in range(20):
            model.scraped(slot, 0, 8.0, 1.0)
        for _ in range(40):
            seconds = 0.1 * (3.0 if slot == 0 else 1.0)
            model.learn_first(FirstToken(NOW, slot, 0, 500.0, 0.0, 0.0, 1.0, 0.1, seconds))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        none, load, usage = np.zeros(3), np.array([1.0, 2.0, 12.0]), np.array([0.0, 0.0, 0.9])
        starts, ahead = np.zeros((1, CELLS, 3)), np.array([0.0, 3000.0, 0.0])
        starts[0, START, 1] = NOW - 0.6
        found = model.outlook(np.arange(3), starts, NOW, 5000.0, None, 0.0, ahead, load, load, none, none, usage, 1e5 + none)
    return [row.tolist() for row in found[:2]]


@interpreted_only("compiled classes cannot be patched")
@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("without") and "siblings" not in row])
def test_a_row_changes_what_is_predicted(row: str) -> None:
    whole = predicted(ROWS[WHOLE]())
    assert predicted(ROWS[row]()) != whole
    assert predicted([]) == whole, "and nothing after it"
