"""The sample of an endpoints file is what the discovery reads, and has what the shipped configurations select by."""

from pathlib import Path

from workers.supervisor.endpoints.discovery import parse_file

SAMPLE = Path(__file__).parents[4] / "deploy" / "endpoints.yaml"


def test_the_sample_is_read_without_a_remark() -> None:
    entries, faults, remarks = parse_file(SAMPLE.read_bytes(), SAMPLE.name)[:3]
    assert (faults, remarks) == ([], [])
    assert {dict(entry.labels).get("llm-d.ai/role") for entry in entries} == {"encode", "prefill", "decode"}
    assert {dict(entry.labels).get("tenant-class") for entry in entries} >= {"reserved", None}
