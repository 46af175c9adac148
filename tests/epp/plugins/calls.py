"""Makes filters and scorers by type name, with parameters as in a configuration, and calls them as a profile run does."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from epp.candidates import Candidates
from epp.config import registry
from epp.plugin import Plugin, Profile
from epp.plugins import pickers
from epp.plugins.pickers.max_score import MaxScore
from epp.request import Request
from tests.fakes import FakeServices, request

PROFILE = Profile("default", (), (), MaxScore("p", pickers.Parameters()))


def profile(name: str) -> Profile:
    return Profile(name, (), (), PROFILE.picker)


def made(type_name: str, **parameters: Any) -> Any:
    """A started plugin. The parameters are in camelCase."""
    cls = registry.find(type_name)
    plugin: Plugin = cls(type_name, msgspec.convert(parameters, cls.Params))
    plugin.start(FakeServices())
    return plugin


def score(scorer: Any, c: Candidates, r: Request | None = None, profile: Profile = PROFILE) -> list[float]:
    scores = scorer.score(r or request(), c, profile)
    return [0.0] * len(c) if scores is None else scores.tolist()


def kept(filter: Any, c: Candidates, r: Request | None = None) -> list[int]:
    """Indices of the endpoints that stay."""
    mask = filter.keep(r or request(), c, PROFILE)
    assert mask.dtype == np.bool_
    assert mask.shape == (len(c),)
    return np.flatnonzero(mask).tolist()


def only(c: Candidates, *rows: int) -> Candidates:
    return c.keep(np.isin(np.arange(len(c)), rows))


def permuted(values: Sequence[Any], order: Sequence[int]) -> list[Any]:
    return [values[index] for index in order]
