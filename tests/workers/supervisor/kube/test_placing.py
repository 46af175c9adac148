"""Which InferencePools a picker serves that finds its pools while it runs: those with its Service, each in the place of its port."""

from epp.endpoints.label_selectors import Selector
from tests.reports import Reports
from workers.process.places import Places
from workers.shared.documents import Placed
from workers.supervisor.kube.placing import Placing, Ports
from workers.supervisor.kube.pool import InferencePool

PORTS = (9102, 9103, 9104)


def pool(port: int, service: str = "epp") -> InferencePool:
    return InferencePool(Selector(), (8000,), service=service, port=port)


def placing(reports: Reports, *names: str, service: str = "epp", present: dict[int, str] | None = None) -> Placing:
    before = {number: Placed(name, PORTS[number]) for number, name in (present or {}).items()}
    return Placing(Places({}, PORTS, "" if names else service, names), before, reports, Ports(PORTS))


def named(found: Placing) -> dict[int, str]:
    assert all(PORTS[number] == placed.port for number, placed in found.names.items())
    return {number: placed.name for number, placed in found.names.items()}


def test_the_pools_of_the_service_have_the_places_of_their_ports() -> None:
    found = placing(reports := Reports())
    assert found.place({"a": pool(9103), "b": pool(9102), "other": pool(9104, "stranger")})
    assert named(found) == {1: "a", 0: "b"}
    assert not found.place({"a": pool(9103), "b": pool(9102)}), "nothing has changed"
    assert found.place({"a": pool(9104)})
    assert named(found) == {2: "a"}
    assert reports == []


def test_of_two_pools_with_one_port_the_one_that_is_served_stays() -> None:
    found = placing(reports := Reports(), present={0: "b"})
    assert not found.place({"a": pool(9102), "b": pool(9102)})
    (report,) = reports
    assert "'b'" in str(report) and "port 9102" in str(report)
    found.place({"a": pool(9102), "b": pool(9102)})
    assert len(reports) == 1, "it is told once"
    found.place({"a": pool(9102)})
    assert named(found) == {0: "a"}


def test_a_port_outside_of_the_range_is_told() -> None:
    found = placing(reports := Reports())
    assert not found.place({"a": pool(9200), "b": pool(0)})
    assert [word in str(reports) for word in ("port 9200, which --pool-ports does not have", "names no port")] == [True, True]
    assert list(found.unserved) == ["a", "b"] and "port 9200" in found.unserved["a"]
    assert found.place({"a": pool(9102)})
    assert found.unserved == {}


def test_pools_by_name_need_no_service_and_a_missing_one_is_told() -> None:
    found = placing(reports := Reports(), "a", "b")
    assert found.place({"a": pool(9102, "whatever"), "c": pool(9103)})
    assert named(found) == {0: "a"}
    assert "there is none" in str(reports)
