"""What `epp doctor` takes from the state of a picker of several pools."""

from typing import Any

import msgspec
import pytest

from epp.config.schema import API_VERSION
from shm.observe import Life, Seen
from tests.workers.cli.doctor.test_gateway import PEER, cluster, shipped
from workers.cli.doctor import servers
from workers.cli.doctor.gateway import gateway_findings
from workers.cli.doctor.running import Running, effective, ext_proc_ports, only, pools_of, vouches, waits_s
from workers.cli.doctor.servers import ASKED_MAX, Answer, server_findings
from workers.shared.doctor_report import ERROR, Finding

PLAIN = f"apiVersion: {API_VERSION}\n"
WAITS = PLAIN + "flowControl: {defaultRequestTTL: 7s, priorityBands: [{priority: 1, defaultRequestTTL: 9s}]}\n"
TENANTS = PLAIN + "tenants: {}\n"


def state(a: str = PLAIN, b: str = PLAIN, **changes: Any) -> dict[str, Any]:
    configurations = [{"pools": ["a", "other"], "effective": a}, {"pools": ["b"], "effective": b}]
    return {"pools": {"a": {}, "other": {}, "b": {}}, "settings": {"configurations": configurations}, "endpoints": {}} | changes


def endpoint(pool: str, number: int = 0) -> dict[str, Any]:
    return {"name": f"{pool}{number}", "address": f"10.0.0.{number}:80", "state": "fresh", "pool": pool, "scraped": {}}


def finding(title: str, pool: Any = msgspec.UNSET) -> Finding:
    return Finding("x", ERROR, title, "", "", pool=pool)


def test_each_pool_has_its_effective_configuration() -> None:
    found = state(b=WAITS)
    assert pools_of(found) == ["a", "other", "b"] and pools_of({"version": 1}) == []
    assert "flowControl" in effective(found, "b") and "flowControl" not in effective(found, "other")
    assert effective(found) == {}


def test_the_longest_wait_is_that_of_any_pool_or_of_the_one_that_is_shown() -> None:
    found = state(b=WAITS)
    assert waits_s(found) == 9.0
    assert waits_s(only(Running(None, "", found, []), "a").state) == 0.0


def test_one_pool_has_its_own_endpoints_and_findings_and_those_of_the_picker() -> None:
    findings = [finding("a is wrong", "a"), finding("b is wrong", "b"), finding("a worker is away"), finding("The same in 9 more pools")]
    shown = only(Running(None, "", state(endpoints={"1": endpoint("a"), "2": endpoint("b")}), findings), "a")
    assert list(shown.state["endpoints"]) == ["1"] and pools_of(shown.state) == ["a"]
    assert [each.title for each in shown.findings] == ["a is wrong", "a worker is away"]


def test_tenants_are_known_only_if_all_pools_have_them() -> None:
    assert vouches({"tenants": []}) and not vouches({"pools": {}})
    assert vouches(state(a=TENANTS, b=TENANTS, tenants=[]))
    assert not vouches(state(a=TENANTS, tenants=[]))


def test_a_gateway_may_call_the_picker_at_the_port_of_a_pool() -> None:
    ports = ext_proc_ports(
        Running(Seen("epp", 1, {"grpc": 1, "health": 2, "metrics": 3, "pool 1": 9002}, (), 0.0, Life.RUNNING), "", {}, [])
    )
    assert ports == [1, 9002]
    state = {"pools": {"a": {"port": 9103}, "b": {}, "c": {"port": 1}}}
    opened = Running(Seen("epp", 1, {"grpc": 1}, (), 0.0, Life.RUNNING), "", state, [])
    assert ext_proc_ports(opened) == [1, 9103], "a port that was opened while the picker runs"
    config, other = shipped(), shipped()
    cluster(other)["load_assignment"] = {}
    assert gateway_findings([config, other], PEER._replace(ports=ports)) == []


def test_servers_of_all_pools_are_asked_in_turn_and_counted_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(name: str, address: str, _pages: Any) -> Answer:
        asked.append(name)
        return Answer(name, address, failed="timed out" if name.startswith("b") else "")

    monkeypatch.setattr(servers, "_ask", ask)
    many = {str(number): endpoint("a", number) for number in range(ASKED_MAX)}
    found = server_findings(state(endpoints=many | {"x": endpoint("b", 200), "y": endpoint("b", 201)}))
    assert len(asked) == ASKED_MAX and {"b200", "b201"} < set(asked)
    assert [each.title for each in found] == ["Pool b: Not reachable from this command, but from the picker: 2 servers"]
