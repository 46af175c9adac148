"""Recordings of a real picker: what they tell, and what they keep to themselves."""

import json
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

from epp.prefix.blocks import block_hashes, root
from epp.recording.keys import Keyed, id_hash
from loadtest.demo.children import environment, python
from tests.e2e.cluster import CHAT, COMPLETIONS, MODEL, Cluster, Picker, ask, chat, completion, eventually, run
from tests.e2e.conftest import FAST, Gateway
from workers.supervisor.record_keeper import FRAME_S

CANARY = "the quick brown canary sings of parquet floors "
TENANT = "tenant-acme-corporation"
HEADER = "x-canary-header-value-7431"
REQUEST_ID = "0a1b2c3d-1111-4222-8333-444455556666"
STORED_S = 15.0


def exported(folder: Path) -> list[dict[str, Any]]:
    done = run(python("workers", "record", "export", str(folder), "--jsonl=-"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def written(picker: Picker, records: int) -> bool:
    return eventually(lambda: picker.counter("recording_records_total") >= records, STORED_S)


def unpacked(folder: Path) -> bytes:
    """Returns the content of all files as the standard tool sees it."""
    return b"".join(
        zstandard.ZstdDecompressor().stream_reader(file.read_bytes(), read_across_frames=True).read() for file in folder.iterdir()
    )


def test_a_recording_has_the_decisions_and_outcomes_of_all_requests(cluster: Cluster, tmp_path: Path) -> None:
    fleet = cluster.fleet(3, *FAST)
    picker = cluster.picker(fleet.file, f"--record-dir={tmp_path / 'rec'}", workers=2)
    port = cluster.envoy(picker)
    for number in range(6):
        assert ask(port, CHAT, chat(f"{CANARY}{number} " * 200, max_tokens=4)).status == 200
    assert written(picker, 20)
    rows = exported(tmp_path / "rec")
    assert len(rows) == 6
    for row in rows:
        assert row["status"] == 200 and row["whole"] and row["endpoint"] in row["candidates"]
        assert row["model"] == MODEL and row["completion_tokens"] == 4 and row["prompt_tokens"] > 1000
        assert len(row["candidates"]) == len(row["candidates_inflight"]) == 3
        assert 0 < row["first_token_s"] <= row["lasted_s"] and len(row["block_hashes"]) > 10
        assert row["scores"][0]["scorers"] and max(row["scores"][0]["totals"]) > 0


def test_a_recording_survives_kill_nine_and_names_no_text_header_or_tenant(cluster: Cluster, tmp_path: Path) -> None:
    folder, secret = tmp_path / "rec", tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    fleet = cluster.fleet(3, *FAST)
    picker = cluster.picker(fleet.file, f"--record-dir={folder}", f"--prefix-secret-file={secret}", workers=2, run_dir=tmp_path / "run")
    port = cluster.envoy(picker)
    headers = {
        "x-llm-d-inference-fairness-id": TENANT,
        "x-llm-d-inference-objective": TENANT,
        "authorization": f"Bearer {HEADER}",
        "cookie": HEADER,
        "x-request-id": REQUEST_ID,
    }
    prompt = CANARY * 300
    assert ask(port, COMPLETIONS, completion(prompt, max_tokens=4, user=TENANT, cache_salt=HEADER), headers).status == 200
    assert written(picker, 10)
    os.killpg(picker.child.process.pid, signal.SIGKILL)
    picker.child.process.wait()
    cluster.forget(picker.child)
    (row,) = exported(folder)
    assert row["status"] == 200 and row["flow"] and row["completion_tokens"] == 4
    told = run(python("workers", "explain", f"--trace={folder}", f"--id={REQUEST_ID}", "--config-file=deploy/config/default.yaml"))
    assert told.returncode == 0 and told.stdout.count(f"sent to {row['address']}") >= 1, told.stderr
    content = unpacked(folder)
    assert MODEL.encode() in content and row["endpoint"].encode() in content  # what it may say, so that the search proves something
    for canary in (*CANARY.split(" ")[1:4], TENANT, "acme", HEADER, "7431", REQUEST_ID, "0123456789abcdef"):
        assert canary.encode() not in content
    hashes = [int(value, 16) for value in row["block_hashes"]]
    guesses = [guess for seed in (0, 1, 42) for guess in _guesses(prompt, seed)]
    assert not set(hashes) & set(guesses)
    assert row["flow"] not in {Keyed(seed)(TENANT) for seed in (0, 1, 42)}


def _guesses(prompt: str, seed: int) -> list[int]:
    return block_hashes(prompt.encode(), 256, root(MODEL, HEADER, seed), seed).tolist()


def test_epp_record_records_a_running_picker_for_a_while(gateway: Gateway, tmp_path: Path) -> None:
    flags = (f"--metrics-port={gateway.picker.metrics}", f"--run-dir={gateway.cluster.directory / 'run'}")
    command = python("workers", "record", "--seconds=60", f"--folder={tmp_path / 'rec'}", *flags)
    recording = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for what runs beside it
    )
    before = gateway.picker.counter("recording_records_total")
    assert eventually(lambda: (tmp_path / "rec").exists() and any((tmp_path / "rec").iterdir()), STORED_S)
    for number in range(5):
        ask(gateway.port, COMPLETIONS, completion(f"{CANARY}{number}", max_tokens=2), {"x-request-id": REQUEST_ID})
    assert written(gateway.picker, int(before) + 15)
    other = run(python("workers", "record", "--seconds=5", f"--folder={tmp_path / 'other'}", *flags))
    assert other.returncode == 1 and "records into" in other.stderr
    recording.send_signal(signal.SIGINT)
    out, errors = recording.communicate(timeout=STORED_S)
    assert recording.returncode == 0 and ".epprec" in out and " 0 lost" not in errors, errors
    rows = exported(tmp_path / "rec")
    assert len(rows) == 5 and {row["id_hash"] for row in rows} == {id_hash(REQUEST_ID)}
    assert not gateway.picker.counter("recording_lost_records_total")


def test_the_small_recording_of_an_idle_picker_does_not_grow(gateway: Gateway) -> None:
    picker = gateway.picker

    def rests() -> bool:
        records = picker.counter("recording_records_total")
        time.sleep(3 * FRAME_S)
        return records == picker.counter("recording_records_total")

    assert written(picker, 1) and eventually(rests, STORED_S)
    idle = picker.counter("recording_records_total")
    ask(gateway.port, COMPLETIONS, completion(CANARY, max_tokens=2))
    assert written(picker, int(idle) + 3)


def test_a_picker_does_not_start_with_a_folder_that_it_cannot_write(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fleet = cluster.fleet(1, *FAST)
    picker = cluster.picker(fleet.file, f"--record-dir={tmp_path / 'file'}", workers=1, ready=False)
    assert eventually(lambda: picker.child.process.poll() is not None, STORED_S)
    cluster.forget(picker.child)
    assert "--record-dir" in picker.child.text() and "File exists" in picker.child.text()
