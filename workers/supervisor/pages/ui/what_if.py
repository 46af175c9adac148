"""Serves `/debug/decisions/what-if`: the candidates of a decision, ranked with other weights.

    ?request_id=ID&profile=NAME&SCORER=WEIGHT&...

A worker remembers 32 decisions, which a busy pool makes in seconds. So this page also knows the last KEPT decisions that
`/debug/decisions` has answered with: those that someone may look at.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl

import msgspec

from epp.decision.explain import Explanation
from epp.decision.what_if import what_if
from workers.supervisor.pages.decisions import JSON
from workers.supervisor.pages.page import PageAnswer, Request

KEPT: Final = 64
WEIGHT_MAX: Final = 1e6


class WhatIfPage:
    """Makes the page, and remembers decisions for it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Explanation] = OrderedDict()

    def remember(self, decisions: Sequence[Explanation]) -> None:
        """Remembers decisions that a client has seen, up to KEPT of them. A decision without a request id has no name."""
        for each in reversed(decisions):
            if each.request_id:
                self._kept[each.request_id] = each
                self._kept.move_to_end(each.request_id)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def __call__(self, request: Request) -> PageAnswer:
        parameters = dict(parse_qsl(request.query))
        request_id, name = parameters.pop("request_id", ""), parameters.pop("profile", "")
        decision = self._kept.get(request_id)
        if decision is None:
            return _wrong(HTTPStatus.NOT_FOUND, "this decision is not remembered any more; choose a newer one")
        profile = next((each for each in decision.profiles if each.profile == name), None)
        try:
            weights = {scorer: _weight(text) for scorer, text in parameters.items()}
        except ValueError:
            return _wrong(HTTPStatus.BAD_REQUEST, f"a weight is a number from 0 to {WEIGHT_MAX:g}")
        ranked = None if profile is None else what_if(profile, weights)
        if ranked is None:
            return _wrong(HTTPStatus.NOT_FOUND, "the decision has no such profile, or it had no candidate")
        return PageAnswer(msgspec.json.encode(ranked), JSON, fields=(("Cache-Control", "no-store"),))


def _weight(text: str) -> float:
    weight = float(text)
    if not (math.isfinite(weight) and 0 <= weight <= WEIGHT_MAX):
        raise ValueError(text)
    return weight


def _wrong(status: HTTPStatus, text: str) -> PageAnswer:
    return PageAnswer(f"{text}\n".encode(), status=status)
