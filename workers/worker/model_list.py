"""Answers GET /v1/models where a picker serves several pools: lists the models of all pools that a request could reach.

    pools file: names without `*`                         ─┐
    endpoints: the models that they list, if the name leads to them  ─┴─▶ pools that know the tenant ─▶ one list

A model that endpoints list is only included if a request with its name would reach their pool. So the list has the real models of `phi-*`,
but no model with a name that leads to another pool. The list has no models of a pool with tenants that does not know the client.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from epp.config.tenants_section import tenants_of
from epp.errors import Cause, Refused
from epp.protocol import codec
from epp.protocol.models import Listed, Model, listed
from epp.request.pool_choice import PoolChoice
from epp.request.tenants import Tenants
from workers.process.instance import Instance
from workers.shared.documents import Served, ServedView

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig

KEPT_MAX: Final = 64  # answers for different sets of pools
CONFIGURATIONS_MAX: Final = 1024  # the number of configurations with kept tenants


class ModelList:
    """Makes the answers, and keeps them until pools, configurations or models change."""

    def __init__(self, view: ServedView, seed: int) -> None:
        """`seed`: the seed of prefix hashes (`Credentials.prefix_seed`)."""
        self._view = view
        self._seed = seed
        self._version = -1
        self._choice: PoolChoice | None = None
        self._kept: dict[tuple[int, ...], bytes] = {}
        self._tenants: dict[int, tuple[EffectiveConfig, Tenants]] = {}

    def answer(
        self, choice: PoolChoice, pools: Sequence[Instance], headers: codec.Headers, message: bytes, without: Collection[int] = ()
    ) -> bytes:
        """Returns the framed answer. At least one of the pools is chosen by model. `pools`: each pool under its present configuration.
        `message`: the ProcessingRequest with the headers. `without`: pools to leave out.

        Raises Refused if no pool knows the tenant, and ProtocolViolation for malformed headers or metadata.
        """
        open_to = tuple(pool for pool in choice.by_model if pool not in without and self._admits(pools[pool], headers, message))
        if not open_to:
            raise Refused(Cause.UNKNOWN_TENANT)
        served = self._view.current()
        if self._view.version != self._version or choice is not self._choice:
            self._version, self._choice = self._view.version, choice
            self._kept.clear()
        if (kept := self._kept.get(open_to)) is None:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            kept = self._kept[open_to] = listed(
                _models(choice, [pool.options.pool_name for pool in pools], open_to, served), int(time.time())
            )
        return kept

    def _admits(self, pool: Instance, headers: codec.Headers, message: bytes) -> bool:
        config = pool.config
        if config.tenants is None:
            return True
        if (known := self._tenants.get(id(config))) is None:
            if len(self._tenants) >= CONFIGURATIONS_MAX:
                self._tenants.clear()
            known = self._tenants[id(config)] = config, tenants_of(config.tenants, config.keys, self._seed)
        try:
            known[1].of(headers, message)
        except Refused:
            return False
        return True


def _models(choice: PoolChoice, names: Sequence[str], pools: tuple[int, ...], served: Served) -> Iterator[Listed]:
    """Yields the models of these pools. The models of the pools file come first, with the details from endpoints."""
    for pool in pools:
        name, named = names[pool], choice.named_models(pool)
        known: Mapping[str, Model] = {model.id: model for model in served.get(pool, ())}
        exact = frozenset(named)
        reached = (model for model in known if model not in exact and choice.pool_of_model(model) == pool)
        for model in (*named, *reached):
            yield Listed(name, known.get(model) or Model(model))
