"""Compares the InferencePools of a namespace with what the pools of the picker expect."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from workers.process.instance import Instance
from workers.supervisor.kube.discovery import fixed_pool
from workers.supervisor.kube.pool import InferencePool, protocol_mismatch

UNEXPECTED: Final = "a pool is not as expected"

log = structlog.get_logger()


class ExpectedPools:
    """Chooses the InferencePool of each pool. With several pools, reports each difference from the expectations once."""

    def __init__(self, pools: Callable[[], Sequence[Instance]], report: Callable[..., None]) -> None:
        """`pools` returns the pools of one namespace. Pools without a name are empty places."""
        self._pools = pools
        self._report = report
        self._fixed = {pool.pool or 0: fixed for pool in pools() if (fixed := fixed_pool(pool.options)) is not None}
        self._said: dict[str, str] = {}

    def choose(self, known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
        """Returns the InferencePool of each pool that has one. `known`: all InferencePools of the namespace, by name."""
        named = {pool.pool or 0: self.name_of(pool) for pool in self._pools()}
        return self._fixed | {number: known[name] for number, name in named.items() if name in known}

    def name_of(self, pool: Instance) -> str:
        """Returns the name of the InferencePool that a pool expects, or ""."""
        if pool.options.endpoint_selector:
            return ""
        return pool.kube.name if pool.kube is not None else pool.options.pool_name

    def look(self, chosen: Mapping[int, InferencePool], unread: Callable[[str], str]) -> None:
        """Reports new differences. `unread` returns why there is no InferencePool of a name."""
        before, self._said = self._said, {}
        for pool in self._pools():
            name = pool.options.pool_name
            if name and pool.kube is not None and (why := self._difference(pool, chosen.get(pool.pool or 0), unread)):
                self._said[name] = why
                if before.get(name) != why:
                    self._report(UNEXPECTED, pool=name, reason=why)
        for name in before.keys() - self._said.keys():
            log.info("the pool is as expected again", pool=name)

    def _difference(self, pool: Instance, found: InferencePool | None, unread: Callable[[str], str]) -> str:
        kube = pool.kube
        assert kube is not None
        if found is None:
            return f"InferencePool '{kube.name}' in namespace {pool.options.pool_namespace} is not known: {unread(kube.name)}"
        if mismatch := parser_mismatch(pool, found):
            return mismatch
        if kube.own_port and found.port not in (0, kube.own_port):
            return (
                f"InferencePool '{kube.name}' names port {found.port} of its picker, and the pools file says {kube.own_port}: requests "
                "arrive only if the Service leads from one to the other"
            )
        return ""


def parser_mismatch(pool: Instance, found: InferencePool) -> str:
    """Returns why a parser of the pool's configuration cannot read the protocol of its servers; "" if all parsers can."""
    return protocol_mismatch(found, [(parser.name, parser.app_protocols) for parser in pool.config.pipeline.wiring.parsers])
