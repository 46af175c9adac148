"""Makes filters and scorers by type name, with parameters as in a configuration, and calls them as a profile run does."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from epp import testing
from epp.candidates import Candidates
from epp.config import registry
from epp.plugin import Profile
from epp.request import Request
from epp.testing import PROFILE
from tests.fakes import FakeServices, request


def profile(name: str) -> Profile:
    return Profile(name, (), (), PROFILE.picker)


def made(type_name: str, **parameters: Any) -> Any:
    """A started plugin. The parameters are in camelCase."""
    return testing.made(registry.find(type_name), FakeServices(), **parameters)


def score(scorer: Any, c: Candidates, r: Request | None = None, profile: Profile = PROFILE) -> list[float]:
    return testing.scores(scorer, r or request(), c, profile)


def kept(keeper: Any, c: Candidates, r: Request | None = None) -> list[int]:
    """Indices of the endpoints that stay."""
    mask = keeper.keep(r or request(), c, PROFILE)
    assert mask.dtype == np.bool_
    assert mask.shape == (len(c),)
    return np.flatnonzero(mask).tolist()


def only(c: Candidates, *rows: int) -> Candidates:
    return c.keep(np.isin(np.arange(len(c)), rows))


def permuted(values: Sequence[Any], order: Sequence[int]) -> list[Any]:
    return [values[index] for index in order]
