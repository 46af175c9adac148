"""`epp explain --trace`: why then, and where another configuration would send the request."""

import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from epp.data import KV_USAGE, WAITING
from epp.decision.explain import explain
from epp.recording.records import VERSION, EndpointList, Member, Opened, Scraped, batch, frame
from epp.recording.trace import Trace, requests
from tests.workers.worker.telemetry.test_recorder import ID, Recording, answered, with_prefixes
from workers.cli.explain import command
from workers.cli.explain_trace import why_then
from workers.shared.recording import Frame, Limits
from workers.shared.recording.export import row
from workers.shared.recording.files import RecordFiles
from workers.shared.recording.reader import batches_of

QUEUE = "plugins:\n- {type: queue-scorer}\n"


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, Recording]:
    """A recording with one request to one of three endpoints, as supervisor and worker write it."""
    site, pipeline = with_prefixes()
    body = b'{"model":"m","prompt":"%s"}' % (b"p" * 600)
    answered(site, body)
    live = Recording(site, pipeline)
    answered(site, body, **{"x-request-id": ID})
    live.sender.flush()
    members = [Member(1.0, True, slot, 0, "default", f"pod-{slot}", f"10.0.0.{slot + 1}:8000", {}) for slot in range(3)]
    scraped = Scraped(1.0, [KV_USAGE.name, WAITING.name], _ints(0, 1, 2), _floats(1, 1, 1), _floats(0.1, 2, 0.2, 0, 0.3, 1), b"\1\1\1")
    files = RecordFiles(str(tmp_path / "rec"), "epp", Limits())
    content = [batch([Opened(VERSION, "", 1, 5000.0, 0.0, 1), *members, scraped]), *live.batches()]
    files.put(Frame(1, frame(content), 1))
    files.end()
    return tmp_path / "rec", live


def test_a_request_is_explained_and_exported_although_its_list_of_endpoints_was_lost(recording: tuple[Path, Recording]) -> None:
    trace = Trace()
    kept = ([each for each in batch if not isinstance(each, EndpointList)] for batch in batches_of(str(recording[0]), print))
    (request,) = requests(kept, trace)
    rows = range(3)
    assert request.considered() == [None] * len(rows)
    (profiled,) = why_then(request, trace).profiles
    assert {one.endpoint for one in profiled.candidates} <= {f"row {number}" for number in rows}
    assert (row(request)["candidates"], row(request)["endpoint"]) == ([None] * len(rows), None)


def _ints(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def _floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def run(*flags: str) -> Result:
    return CliRunner().invoke(command, flags)


def test_the_recorded_decision_has_the_totals_and_scores_of_the_live_one(recording: tuple[Path, Recording]) -> None:
    folder, live = recording
    done = run(f"--trace={folder}", f"--id={ID}", "--json")
    assert done.exit_code == 0, done.output
    (told,) = json.loads(done.stdout)["decisions"]
    _, request, decision, _, used = live.site.recent.kept[-1]
    real = explain(used.pipeline, request, decision)
    assert told["targets"] == real.targets and told["profiles"][0]["picked"] == real.profiles[0].picked
    assert told["profiles"][0]["margin"] == pytest.approx(real.profiles[0].margin, abs=1e-3)
    for ours, theirs in zip(told["profiles"][0]["candidates"], real.profiles[0].candidates, strict=True):
        assert (ours["endpoint"], ours["state"]) == (theirs.endpoint, "fresh")
        assert ours["total"] == pytest.approx(theirs.total)
        assert {s["scorer"]: s["raw"] for s in ours["scores"]} == pytest.approx({s.scorer: s.raw for s in theirs.scores}, abs=1e-3)
        assert ours["values"]["inflight_requests"] == theirs.values["inflight_requests"]
        assert ours["predicted_tokens"] == theirs.predicted_tokens == (149 if theirs.picked else 0)


def test_another_configuration_decides_at_the_recorded_moment(recording: tuple[Path, Recording], tmp_path: Path) -> None:
    (tmp_path / "queue.yaml").write_text(QUEUE)
    done = run(f"--trace={recording[0]}", f"--id={ID}", f"--config-file={tmp_path / 'queue.yaml'}", "--json")
    assert done.exit_code == 0, done.output
    then, now = json.loads(done.stdout)["decisions"]
    assert len(now["profiles"][0]["candidates"]) == 3 and now["targets"] == ["10.0.0.2:8000"]
    assert then["body_bytes"] > 600


def test_the_text_names_the_target_and_a_number_finds_the_request_too(recording: tuple[Path, Recording]) -> None:
    folder, live = recording
    done = run(f"--trace={folder}", f"--id={live.sender.stream:08x}-1")
    assert done.exit_code == 0 and "sent to 10.0.0." in done.stdout, done.output


def test_an_unknown_request_and_a_lone_flag_are_refused(recording: tuple[Path, Recording]) -> None:
    done = run(f"--trace={recording[0]}", "--id=tenant-7")
    assert done.exit_code == 1 and "no request tenant-7" in done.stderr and "no UUID" in done.stderr
    done = run("--trace=somewhere")
    assert done.exit_code == 2 and "both --trace and --id" in done.stderr
