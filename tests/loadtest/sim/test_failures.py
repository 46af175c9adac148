"""A simulated server that fails at once, with any status, or with a 200 without a body."""

import pytest

from loadtest.sim.fleet import Fleet
from tests.loadtest.sim.test_server import COMPLETIONS, PROMPT, order
from tests.loadtest.sim.wire import ask, with_fleet


@pytest.mark.parametrize("status", [400, 404, 429, 503])
def test_a_faulty_server_answers_with_the_status_that_the_order_names(status: int) -> None:
    async def work(fleet: Fleet) -> None:
        await order(fleet, "error", status=status)
        answer = await ask(fleet.servers[0].port, COMPLETIONS, PROMPT)
        assert answer.status == status
        assert answer.json()["error"]["code"] == status
        assert (await ask(fleet.servers[0].port, "/metrics")).status == 200

    with_fleet(work)


def test_a_faulty_server_may_answer_200_without_a_body() -> None:
    async def work(fleet: Fleet) -> None:
        await order(fleet, "error", status=200)
        for streamed in ({}, {"stream": True}):
            answer = await ask(fleet.servers[0].port, COMPLETIONS, PROMPT | streamed)
            assert (answer.status, answer.body) == (200, b"")

    with_fleet(work)
