"""What the parent makes: all of it or nothing, and refusals that say what to do."""

import json
import os
import socket
import ssl
import stat
from pathlib import Path

import pytest

from epp.config import load
from epp.metrics import ATTEMPTS, ERROR, LabelCaps
from shm.segment import SegmentError
from tests.workers.instances import made, options
from workers.instance import (
    Instance,
    StartError,
    Unusable,
    certificates,
    listen,
    packet_pipe,
    prefix_seed,
    shared_bytes,
)


def test_everything_is_there_and_recorded(tmp_path: Path) -> None:
    with made(tmp_path, workers=3) as instance:
        assert instance.lanes.schema.lanes == instance.seats == 1 + 2 * 3  # as many workers more as may be added
        assert instance.table_schema.columns == (
            "cache_block_size",
            "cache_num_blocks",
            "kv_cache_usage",
            "running_requests",
            "waiting_requests",
        )
        assert set(instance.measures) == {
            ("approx-prefix-cache-producer", "prefix_indexer_hit_ratio"),
            ("approx-prefix-cache-producer", "prefix_indexer_hit_bytes"),
        }
        assert len(instance.bus) == len(instance.wakeups) == 6
        info: dict = {}
        segments: list[str] = []
        for line in (tmp_path / f"{instance.options.instance}.instance").read_text().splitlines():
            info |= json.loads(line)
            segments += json.loads(line).get("segments", [])
        assert info["ports"]["grpc"] == instance.listener.getsockname()[1]
        assert [f"/dev/shm{name}" for name in segments] == [
            path for name in segments if os.path.exists(path := f"/dev/shm{name}")
        ]
        assert all(stat.S_IMODE(os.stat(f"/dev/shm{name}").st_mode) == 0o600 for name in segments)
    assert not any(os.path.exists(f"/dev/shm{name}") for name in segments)
    assert os.listdir(tmp_path) == []


def test_what_it_takes_of_shared_memory_is_known_without_making_it(tmp_path: Path) -> None:
    config = load("", "test")
    needed = shared_bytes(options(tmp_path), config)
    assert os.listdir(tmp_path) == []
    with made(tmp_path) as instance:
        taken = {s.name.rpartition("-")[2]: os.stat(f"/dev/shm{s.name}").st_blocks * 512 for s in instance.segments}
    assert taken == needed


def test_too_little_shared_memory_names_the_flags_that_take_less_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = list(os.statvfs("/dev/shm"))
    values[0:5] = [4096, 4096, 256, 256, 256]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(
        SegmentError, match=r"1\.0 MiB free of 1\.0 MiB.*--workers-max, --max-endpoints or --index-entries"
    ):
        Instance.create(options(tmp_path), load("", "test"))
    assert os.listdir(tmp_path) == []


def test_replicas_are_told_apart_even_if_their_pods_have_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_NAME", "epp-5d-x7")
    with made(tmp_path) as one, made(tmp_path) as two:
        assert one.identity != two.identity
        assert one.identity.startswith("epp-5d-x7_")


def test_every_call_of_a_plugin_has_a_histogram_of_its_own(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        points = instance.config.pipeline.timed_points()
        assert set(instance.timers) == {(point, plugin.name) for point, plugin in points}
        labels = [instance.families[place].labels for place in instance.timers.values()]
        assert [label["extension_point"] for label in labels] == [point for point, _ in points]
        assert len(set(instance.timers.values()) | set(instance.measures.values())) == len(points) + 2


def test_workers_write_series_and_all_are_read_together(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        for index in range(instance.seats - 1):
            writer = instance.series_writer(ERROR, index)
            block = writer.block(("m", "m", "", "0", "Internal"))
            writer.words[block + writer.counter_at["request_error_total"]] += 1
        rows = instance.series_reader(ERROR).rows()
        assert {labels[-1]: values.counters for labels, values in rows.items()} == {"Internal": (instance.seats - 1,)}


def test_groups_of_one_worker_share_their_caps(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        caps = LabelCaps(models_max=1)
        error, attempts = (instance.series_writer(group, 0, caps) for group in (ERROR, ATTEMPTS))
        error.block(("m", "m", "", "0", "Internal"))
        attempts.block(("failure", "another", "", "", ""))
        assert next(iter(instance.series_reader(ATTEMPTS).rows())) == ("failure", "other", "", "", "")


def test_a_worker_keeps_what_is_its_own_and_no_more(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        closed = instance.not_for_worker(0)
        assert instance.bus[0].writer not in closed
        assert instance.bus[1].writer in closed
        assert instance.life.writer in closed and instance.life.reader not in closed
        assert instance.family.writer not in closed
        assert instance.listener.fileno() not in closed


def test_the_supervisor_cannot_keep_itself_alive(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        closed = instance.not_for_supervisor()
        assert {instance.life.writer, instance.family.writer} <= set(closed)
        assert not {instance.life.reader, instance.family.reader, *instance.bus_readers} & set(closed)


def test_children_report_and_torn_reports_are_nothing(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        instance.ready(2)
        os.write(instance.reports.writer, b"\xff")
        instance.failed(1, "x" * 10_000)
        ready, failed = instance.received()
        assert (ready.seat, ready.pid, ready.text) == (2, os.getpid(), "")
        assert failed.seat == 1
        assert 100 < len(failed.text) < 4096
        assert instance.received() == []


def test_the_stopping_word_is_seen_by_a_child(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        assert not instance.stopping
        pid = os.fork()
        if pid == 0:
            instance.stop()
            os._exit(0)
        os.waitpid(pid, 0)
        assert instance.stopping


def test_a_port_serves_ipv4_and_ipv6() -> None:
    with listen(0, "--x") as held:
        port = held.getsockname()[1]
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as client:
                client.connect((address, port))


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
)
def test_a_port_that_is_taken_is_refused_with_its_flag_and_how_to_find_the_holder(family: int, address: str) -> None:
    with socket.socket(family) as holder:
        holder.bind((address, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(StartError, match=rf"port {port} \(--metrics-port\) is in use: another picker.*ss -ltnp"):
            listen(port, "--metrics-port")


def test_when_it_cannot_be_made_nothing_is_left(tmp_path: Path) -> None:
    with listen(0, "--x") as holder:
        before = set(os.listdir("/dev/shm"))
        given = options(tmp_path, metrics_port=holder.getsockname()[1])
        with pytest.raises(StartError, match="--metrics-port"):
            Instance.create(given, load("", ""))
        assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(given.instance)]
        assert os.listdir(tmp_path) == []


def test_a_secret_gives_the_same_seed_every_time_and_none_a_new_one(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    with_secret, without = options(tmp_path, prefix_secret_file=str(secret)), options(tmp_path)
    assert prefix_seed(with_secret) == prefix_seed(with_secret)
    assert prefix_seed(without) != prefix_seed(without)


@pytest.mark.parametrize(("content", "why"), [("short", "at least 16"), (None, "cannot be read: No such file")])
def test_a_secret_that_is_none_is_refused(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError, match=why):
        prefix_seed(options(tmp_path, prefix_secret_file=str(path)))


def test_tls_with_a_certificate_of_its_own_by_default(tmp_path: Path) -> None:
    assert certificates(options(tmp_path)) == (None, None)
    ext_proc, metrics = certificates(
        options(tmp_path, secure_serving=True, tls_cipher_suites=("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",))
    )
    assert ext_proc is not None
    assert metrics is None
    known = {cipher["name"] for cipher in ext_proc.context.current.get_ciphers()}
    assert "ECDHE-ECDSA-AES128-GCM-SHA256" in known
    assert "ECDHE-ECDSA-AES256-GCM-SHA384" not in known


@pytest.mark.parametrize(
    ("suites", "oldest"),
    [
        (("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"), ssl.TLSVersion.TLSv1_2),
        (("TLS_AES_128_GCM_SHA256",), ssl.TLSVersion.TLSv1_3),
    ],
)
def test_suites_of_tls_1_3_may_be_listed_and_without_others_there_is_no_older_version(
    tmp_path: Path, suites: tuple[str, ...], oldest: ssl.TLSVersion
) -> None:
    ext_proc, _ = certificates(options(tmp_path, secure_serving=True, tls_cipher_suites=suites))
    assert ext_proc is not None
    assert ext_proc.context.current.minimum_version is oldest


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tls_cipher_suites": ("TLS_NULL",)}, "TLS_NULL unknown; known are TLS_ECDHE"),
        ({"cert_path": "/nowhere"}, "--cert-path: /nowhere/tls.crt"),
        ({"client_ca_file": "/nowhere/ca.pem"}, "--client-ca-file: /nowhere/ca.pem: No such file"),
        ({"metrics_cert_dir": "/nowhere"}, "--metrics-cert-dir: /nowhere/tls.crt"),
    ],
)
def test_tls_that_cannot_be_is_refused(tmp_path: Path, changes: dict, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        certificates(options(tmp_path, secure_serving=True, **changes))


def test_a_packet_pipe_gives_one_frame_per_read() -> None:
    pipe = packet_pipe()
    os.write(pipe.writer, b"one")
    os.write(pipe.writer, b"two")
    assert [os.read(pipe.reader, 4096), os.read(pipe.reader, 4096)] == [b"one", b"two"]
    os.close(pipe.reader)
    os.close(pipe.writer)
