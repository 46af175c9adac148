"""Files of endpoints: what is read from them, and each fault with its line."""

import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.reports import Reports
from tests.workers.supervisor.endpoints.endpoint_lists import CLUSTERS, ENTRIES, GOOD
from workers.host.yaml_files import DiscoveryError
from workers.supervisor.endpoints.discovery import Entry, parse_file
from workers.supervisor.endpoints.endpoints_file import File


def test_yaml_and_json_files_are_read_and_unknown_keys_are_ignored() -> None:
    assert parse_file(GOOD, "f")[:2] == (ENTRIES, [])
    as_json = json.dumps(yaml.safe_load(GOOD.replace(b"gpu: 4", b'gpu: "4"')), indent="\t")
    assert parse_file(as_json.encode(), "f")[:2] == (ENTRIES, [])
    assert parse_file(b"\xef\xbb\xbfendpoints: []", "f") == ([], [], [])
    assert parse_file(b"---\nendpoints: []\n---\n", "f") == ([], [], [])


def test_a_name_that_is_too_long_is_a_fault_of_its_entry() -> None:
    text = f"endpoints:\n- {{name: {'x' * 513}, address: 10.0.0.1, port: 1}}\n- {{name: b, address: 10.0.0.2, port: 1}}\n"
    parsed = parse_file(text.encode(), "f")
    assert [entry.name for entry in parsed.entries] == ["b"]
    (fault,) = parsed.faults
    assert fault.startswith("f:2: name 'xxx") and fault.endswith("is longer than 512 characters")
    assert len(fault) < 300


def test_the_last_duplicate_of_an_endpoint_wins() -> None:
    entries = [f"- {{name: a, address: 10.0.0.{n}, port: {n}}}" for n in (1, 2)]
    parsed = parse_file("\n".join(["endpoints:", *entries]).encode(), "f")
    assert parsed.entries == [Entry("default", "a", "10.0.0.2", 2)]
    assert parsed.remarks == ["f:3: endpoint 'a' is given again, first in line 2; the last one wins"]


def test_a_server_under_two_names_and_an_unknown_field_get_remarks_and_both_endpoints_stay() -> None:
    entries = ["- {name: a, address: '::1', port: 1}", "- {name: b, address: '0::1', port: 1, lables: {x: y}, cached: 1}"]
    parsed = parse_file("\n".join(["endpoints:", *entries]).encode(), "f")
    assert [entry.name for entry in parsed.entries] == ["a", "b"]
    assert parsed.remarks == [
        "f:3: field 'lables' of endpoint 'b' has no effect (did you mean 'labels'?)",
        "f:3: endpoint 'b' has the address of 'a': one server counts as two",
    ]


@cases(
    ("lines", "fault"),
    [
        (["name: a", "port: 1"], "f:2: endpoint 'a': no address"),
        (["name: a", "address: 10.0.0.300", "port: 1"], "f:3: endpoint 'a': address '10.0.0.300' is"),
        (["name: a", "address: a b", "port: 1"], "f:3: endpoint 'a': address 'a b' is neither"),
        (["name: a", "address: 'fe80::1%eth0'", "port: 1"], "f:3: endpoint 'a': address"),
        (["name: a", "address: -x.y", "port: 1"], "f:3: endpoint 'a': address '-x.y'"),
        (["name: a", "address: 10.0.0.1", "port: 0"], "f:4: endpoint 'a': port '0' is not"),
        (["name: a", "address: 10.0.0.1", "port: 65536"], "f:4: endpoint 'a': port '65536'"),
        (["name: a", "address: 10.0.0.1", "port: 8e3"], "f:4: endpoint 'a': port '8e3'"),
        (["name: a", "address: 10.0.0.1"], "f:2: endpoint 'a': port ''"),
        (["name: [a]", "address: 10.0.0.1", "port: 1"], "f:2: name must be a text"),
        (["name: a", "address: 10.0.0.1", "port: 1", "labels: [x]"], "f:5: labels must be a mapping"),
        (["name: a", "address: 10.0.0.1", "port: 1", "labels: {x: [y]}"], "f:5: x must be a text"),
    ],
)
def test_the_fault_of_a_bad_entry_has_its_line_and_the_other_entries_stay(lines: list[str], fault: str) -> None:
    text = "endpoints:\n- " + "\n  ".join(lines) + "\n- {name: b, address: 10.0.0.2, port: 1}\n"
    parsed = parse_file(text.encode(), "f")
    assert [entry.name for entry in parsed.entries] == ["b"]
    assert len(parsed.faults) == 1
    assert parsed.faults[0].startswith(fault)


def test_the_fault_of_a_text_instead_of_an_endpoint_has_its_line() -> None:
    assert parse_file(b"endpoints:\n- a\n- 10.0.0.1:80\n", "f").faults[1].startswith("f:3: an endpoint")


@cases(
    ("text", "fault"),
    [
        (b"", "f:1: the list 'endpoints' is missing"),
        (b"a: 1\nb: 2\n", "f:1: the list 'endpoints' is missing"),
        (b"a: 1\nendpoints: 5\n", "f:2: the list 'endpoints' is missing"),
        (b"- a\n", "f:1: the list 'endpoints' is missing"),
        (b"endpoints:\n- {a: 1\n- b\n", "f:4: neither YAML nor JSON"),
        (b'{"endpoints": [}', "f:1: neither YAML nor JSON"),
        (b"endpoints: \xff", "f: not UTF-8 at byte 11"),
        (b"endpoints: \x00", "f: neither YAML nor JSON"),
        (b"a: 1\nendpoints: *a\n", "f:2: alias *a: no value before it has the anchor &a"),
        (b"endpoints: &a\n- *a\n", "f:2: alias *a: no value before it has the anchor &a"),
        (b"a: &a x\n---\nendpoints: *a\n", "f:3: alias *a: no value before it has the anchor &a"),
        (b"endpoints:\n- {name: a, <<: b}\n", "f:2: '<<' takes a mapping or a list of mappings"),
        (b"endpoints:\n- {name: a, <<: [{b: 1}, [c]]}\n", "f:2: '<<' takes a mapping or a list of mappings"),
        (
            b"a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + b"".join(b"a%d: &a%d [%b]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 9)),
            "f:5: alias *a3: aliases stand for more than 100000 values; write less of them",
        ),
        (b"a0: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (n, n, n - 1) for n in range(1, 40)), "f:16: nested deeper than 16"),
        (b"[" * 500_000, "f:1: nested deeper than 16"),
        (b"- " * 300_000, "f:1: nested deeper than 16"),
        (b"endpoints: []\n---\nendpoints: []\n", "f:3: a second document; write all endpoints into one list"),
        (b"endpoints: []\nendpoints: []\n", "f:2: 'endpoints' is given twice; first in line 1"),
        (b"endpoints:\n- {name: a,\n   name: b}\n", "f:3: 'name' is given twice; first in line 2"),
    ],
)
def test_a_file_without_a_list_of_endpoints_is_refused_with_the_line(text: bytes, fault: str) -> None:
    with pytest.raises(DiscoveryError) as failure:
        parse_file(text, "f")
    assert str(failure.value).startswith(fault)


@given(st.binary(max_size=100) | st.text("[]{}:,-&*a \n\"'1", max_size=60).map(str.encode))
def test_any_bytes_are_either_entries_or_a_discovery_error(noise: bytes) -> None:
    for text in (noise, b"endpoints:\n" + noise, b"endpoints:\n- name: a\n  address: " + noise):
        try:
            parse_file(text, "f")
        except DiscoveryError as failure:
            assert failure.faults


def test_aliases_and_merge_keys_count_as_what_they_stand_for() -> None:
    text = b"""
common: &common {port: "8000", labels: &labels {role: decode}}
more: &more {namespace: prod, port: 9}
endpoints:
- {<<: *common, name: a, address: 10.0.0.1}
- <<: [*common, *more]
  name: b
  address: &there 10.0.0.2
- {name: c, address: *there, port: 1, <<: *more, labels: *labels}
- {"<<": 5, name: d, address: 10.0.0.4, port: 2}
"""
    parsed = parse_file(text, "f")
    assert parsed.faults == []
    role = (("role", "decode"),)
    assert parsed.entries == [
        Entry("default", "a", "10.0.0.1", 8000, role),
        Entry("prod", "b", "10.0.0.2", 8000, role),
        Entry("prod", "c", "10.0.0.2", 1, role),
        Entry("default", "d", "10.0.0.4", 2),
    ]
    assert [remark.partition(" (")[0] for remark in parsed.remarks] == ["f:10: field '<<' of endpoint 'd' has no effect"]


def test_what_a_report_repeats_is_short() -> None:
    long = "9" * 6_000
    for name, address, port in (("x", "h", long), ("x", long, "1"), (long, "h", "0")):
        parsed = parse_file(f"endpoints:\n- name: '{name}'\n  address: '{address}'\n  port: {port}\n".encode(), "f")
        (said,) = (*parsed.faults, *parsed.remarks)
        assert len(said) < 300
        assert "(6000 characters)" in said


def test_a_fault_in_an_aliased_entry_has_the_line_of_its_anchor() -> None:
    parsed = parse_file(b"a: &a\n  name: x\n  port: 0\n  address: h\nendpoints:\n- *a\n", "f")
    assert parsed.faults == ["f:3: endpoint 'x': port '0' is not a number from 1 to 65535"]


def test_a_file_over_one_mebibyte_or_a_missing_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    with pytest.raises(DiscoveryError, match="cannot be read: No such file"):
        File(str(path), Reports()).load()
    path.write_bytes(b"endpoints: []\n" + b"#" * (1 << 20))
    with pytest.raises(DiscoveryError, match="larger than 1048576 bytes"):
        File(str(path), Reports()).load()


def test_a_pipe_instead_of_a_file_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    os.mkfifo(path)
    with pytest.raises(DiscoveryError, match="is a pipe or a device; it is read again and again, so give a file"):
        File(str(path), Reports()).load()
    with pytest.raises(DiscoveryError, match="cannot be read: Is a directory"):
        File(str(tmp_path), Reports()).load()


def test_labels_of_a_cluster_say_where_its_metrics_page_is() -> None:
    parsed = parse_file(CLUSTERS, "f", clusters=True)
    assert not parsed.faults
    assert [entry.page for entry in parsed.entries] == [("metrics.east.example.com", 9090), ("10.0.0.9", 443), None]
    assert [entry.page for entry in parse_file(CLUSTERS, "f").entries] == [None, None, None]


@pytest.mark.parametrize(("labels", "why"), [
    ('{metricsAddress: "a b"}', "address 'a b' is neither"),
    ('{metricsAddress: 10.0.0.1, metricsPort: "99999"}', "port '99999' is not a number"),
])  # fmt: skip
def test_a_wrong_place_of_a_metrics_page_is_a_fault_with_its_line(labels: str, why: str) -> None:
    text = f'endpoints:\n- name: a\n  address: 10.0.0.1\n  port: "1"\n  labels: {labels}\n'
    (fault,) = parse_file(text.encode(), "f", clusters=True).faults
    assert fault.startswith("f:5: endpoint 'a': labels metricsAddress and metricsPort: ") and why in fault
