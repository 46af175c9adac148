"""The report of `epp doctor`: what is written is read, and what is wrong, large or old does not count."""

import time
from pathlib import Path

import pytest

from workers.shared.doctor_report import BYTES_MAX, FINDINGS_MAX, KEPT_S, SUFFIX, Check, Finding, Report, read, write

LONG = Finding("r" * 9_000, "error", "t" * 9_000, "e" * 9_000, "f" * 9_000)


def report(count: int, age_s: float = 0.0) -> Report:
    return {"servers": Check(time.time() - age_s, [LONG] * count)}


def test_a_long_report_is_cut_to_what_a_reader_takes(tmp_path: Path) -> None:
    write(str(tmp_path), "a", "secret", report(10 * FINDINGS_MAX))
    assert (tmp_path / f"a{SUFFIX}").stat().st_size < BYTES_MAX
    found = read(str(tmp_path), "a", "secret")
    assert found is not None
    assert len(found["findings"]) == FINDINGS_MAX


def test_an_old_report_and_one_of_the_future_do_not_count(tmp_path: Path) -> None:
    for age_s in (KEPT_S + 60, -60):
        write(str(tmp_path), "a", "secret", report(1, age_s))
        assert read(str(tmp_path), "a", "secret") is None


def test_a_check_keeps_its_last_result_until_it_is_made_again(tmp_path: Path) -> None:
    at = time.time()
    gateway = Finding("gateway-tls", "error", "t", "e", "f")
    write(str(tmp_path), "a", "secret", {"gateway": Check(at - 50, [gateway]), "servers": Check(at - 50, [LONG])})
    write(str(tmp_path), "a", "secret", {"servers": Check(at - 20, [])})
    found = read(str(tmp_path), "a", "secret")
    assert found is not None
    assert found["checked"] == {"servers": at - 20, "gateway": at - 50}
    assert [each["rule"] for each in found["findings"]] == ["gateway-tls"]
    write(str(tmp_path), "a", "secret", {"gateway": Check(at, [])})
    assert read(str(tmp_path), "a", "secret") == {"checked": {"gateway": at, "servers": at - 20}, "findings": []}


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"at":1}', b"x" * (BYTES_MAX + 1)])
def test_a_malformed_report_does_not_count(tmp_path: Path, data: bytes) -> None:
    (tmp_path / f"a{SUFFIX}").write_bytes(data)
    assert read(str(tmp_path), "a", "secret") is None


def test_without_a_report_there_is_none(tmp_path: Path) -> None:
    assert read(str(tmp_path), "a", "secret") is None


def test_a_report_about_an_earlier_picker_with_the_same_name_does_not_count(tmp_path: Path) -> None:
    write(str(tmp_path), "a", "of the first start", report(1))
    assert read(str(tmp_path), "a", "of the second start") is None
    write(str(tmp_path), "a", "of the second start", {"gateway": Check(time.time(), [])})
    found = read(str(tmp_path), "a", "of the second start")
    assert found is not None
    assert list(found["checked"]) == ["gateway"]
    assert "of the" not in (tmp_path / f"a{SUFFIX}").read_text()
