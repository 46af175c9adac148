"""A running supervisor takes over a changed list of pools."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from epp.config.load import load
from epp.config.pools_file import KubePool
from epp.request.pool_choice import Matched, PoolChoice
from tests.reports import Reports
from tests.waiting import until
from tests.workers.instances import options, removed
from workers.process import pool_views
from workers.process.generations import Bundle, Given
from workers.process.instance import Instance
from workers.process.places import Pool
from workers.process.pool_list import Listed
from workers.process.pool_views import relisted
from workers.supervisor.background import Background
from workers.supervisor.endpoints import endpoints_file
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.later import Later

TEXT = "plugins: [{type: queue-scorer}]\n"
DISCOVERY = "dataLayer: {discovery: {pluginRef: file}}\n"
ENDPOINTS = "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"


class Supervised(SimpleNamespace):
    """The parts of a supervisor that a list of pools changes. `applied`: the ports of the endpoints of the first pool. `order`: the pools
    that got other endpoints, "saved" when the parts of the supervisor learn that pools are gone, and "limits" when the endpoints of
    Kubernetes get other limits.
    """

    def __init__(self, instance: Instance) -> None:
        self.applied: list[int] = []
        self.order: list[int | str] = []
        table = SimpleNamespace(apply=self._apply, inherited=lambda _pool: [], resume=lambda _pool: None)
        super().__init__(
            instance=instance,
            area=instance.memory.areas.area(0),
            predecessor=SimpleNamespace(existed=False),
            background=Background(),
            data=SimpleNamespace(table=table),
            objects=SimpleNamespace(use=lambda _pools: None, reconfigured=lambda *_: None),
            watches=SimpleNamespace(of=lambda *_: []),
            pages=SimpleNamespace(use=lambda *_: None),
            records=SimpleNamespace(use=lambda _instance: None),
            index=None,
            report=Reports(),
            renew_data=lambda: None,
            pools_replaced=lambda: self.order.append("saved"),
            file_changed=lambda: None,
            limits_changed=lambda: self.order.append("limits"),
        )

    def _apply(self, specs: Sequence[EndpointSpec], *, complete: bool = True, pool: int = 0) -> None:
        self.order.append(pool)
        if pool == 0:
            self.applied = sorted(spec.port for spec in specs)


def scenario(
    folder: Path, main: Callable[[Later, Any], Awaitable[None]], text: str = TEXT, endpoints: str = ENDPOINTS, kube: KubePool | None = None
) -> None:
    """Runs a function with the pools `a` and `b`, which have the same endpoints."""
    given, kube_values = Given(text, "c.yaml", {}), tuple(kube) if kube is not None else None
    pools = [Pool(name, given, load(text, "c.yaml"), endpoints, 4, kube) for name in ("a", "b")]
    listed = {place: Listed(pool.name, 0, (f"{pool.name}.svc",), (), endpoints, 4, kube_values) for place, pool in enumerate(pools)}
    choice = PoolChoice([Matched("a", 0, ("a.svc",)), Matched("b", 0, ("b.svc",))])

    async def run(instance: Instance) -> None:
        supervised: Any = Supervised(instance)
        later = Later(supervised)
        await later.follow_endpoints()
        await main(later, supervised)

    with removed(pool_views.create(options(folder, max_endpoints=8), pools, choice, {}, pool_list=listed)) as instance:
        asyncio.run(run(instance))


def test_another_limit_of_a_pool_holds_at_once_for_its_present_endpoints(tmp_path: Path) -> None:
    async def main(later: Later, supervised: Any) -> None:
        assert supervised.applied == [1, 2, 3]
        for number, most in enumerate((2, 3), start=2):
            entry = Listed("a", 0, ("a.svc",), (), ENDPOINTS, most)
            await later._use_list(relisted(supervised.instance, {**supervised.instance.pool_list, 0: entry}, number))
            assert len(supervised.applied) == most

    scenario(tmp_path, main)


def test_another_limit_of_a_pool_with_an_endpoints_file_holds_at_once(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints:\n" + "".join(f"- {{name: n{n}, address: 127.0.0.1, port: {n}}}\n" for n in (1, 2, 3)))
    text = f"{TEXT[:-2]}, {{type: file-discovery, name: file, parameters: {{path: {path}}}}}]\n{DISCOVERY}"

    async def main(later: Later, supervised: Any) -> None:
        for number, most in enumerate((2, 3), start=2):
            entry = Listed("a", 0, ("a.svc",), (), "", most)
            await later._use_list(relisted(supervised.instance, {**supervised.instance.pool_list, 0: entry}, number))
            assert len(supervised.applied) == most
        supervised.background.close()

    scenario(tmp_path, main, text, "")


def test_another_limit_of_a_pool_in_kubernetes_holds_at_once(tmp_path: Path) -> None:
    async def main(later: Later, supervised: Any) -> None:
        entry = supervised.instance.pool_list[0]
        for changed, told in (
            (msgspec.structs.replace(entry, authorities=("c.svc",)), []),
            (msgspec.structs.replace(entry, max_endpoints=2), ["limits"]),
        ):
            supervised.order.clear()
            await later._use_list(relisted(supervised.instance, {**supervised.instance.pool_list, 0: changed}, 2))
            assert [step for step in supervised.order if step == "limits"] == told

    scenario(tmp_path, main, endpoints="", kube=KubePool(name="a"))


def test_what_was_learned_of_a_pool_that_is_gone_is_saved_while_its_endpoints_are_known(tmp_path: Path) -> None:
    async def main(later: Later, supervised: Any) -> None:
        supervised.order.clear()
        moved = Listed("a", 0, ("a.svc",), (), "127.0.0.1:9", 4)
        await later._use_list(relisted(supervised.instance, {0: moved}, 2))
        assert supervised.order[0] == "saved" and sorted(supervised.order[1:]) == [0, 1]

    scenario(tmp_path, main)


def test_a_pool_that_comes_before_its_endpoints_file_does_not_end_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_file, "LOOK_EVERY_S", 0.01)
    path = tmp_path / "endpoints.yaml"
    text = f"{TEXT[:-2]}, {{type: file-discovery, name: file, parameters: {{path: {path}, watchFile: true}}}}]\n{DISCOVERY}"

    async def main(later: Later, supervised: Any) -> None:
        new = Listed("c", 0, ("c.svc",), (), "", 4, since=2)
        await later._use_list(relisted(supervised.instance, {0: new, 1: supervised.instance.pool_list[1]}, 2))
        view = supervised.instance.pools[0]
        bundle = Bundle(2, "c.yaml", text, "", {}, view.layout.names, 0.0, pool="c")
        await later._use(view.under(load(text, "c.yaml"), bundle).with_scrape_tls())
        assert supervised.applied == []
        assert [str(path) in line for line in supervised.report] == [True]
        path.write_text("endpoints:\n- {name: a, address: 127.0.0.1, port: 7}\n")
        await until(lambda: supervised.applied == [7])
        supervised.background.close()

    scenario(tmp_path, main)
