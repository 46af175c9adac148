"""Tests of the resources that children inherit: series in shared memory, words, packet pipes."""

import os
from pathlib import Path

from epp.metrics.label_caps import LabelCaps
from epp.metrics.request_series import ATTEMPTS, ERROR
from tests.workers.instances import made
from workers.process.resources import packet_pipe


def test_workers_write_series_and_a_reader_sums_them(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        for index in range(instance.layout.ordinals - 1):
            writer = instance.memory.series_writer(ERROR, index)
            block = writer.block(("m", "m", "", "0", "Internal"))
            writer.words[block + writer.counter_at["request_error_total"]] += 1
        rows = instance.memory.series_reader(ERROR).rows()
        assert {labels[-1]: values.counters for labels, values in rows.items()} == {"Internal": (instance.layout.ordinals - 1,)}


def test_groups_of_one_worker_share_their_caps(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        caps = LabelCaps()
        error, attempts = (instance.memory.series_writer(group, 0, caps) for group in (ERROR, ATTEMPTS))
        caps.served("m", "m", "")
        error.block(("m", "m", "", "0", "Internal"))
        for model in ("m", "another"):
            attempts.block(("failure", model, "", "", ""))
        assert list(instance.memory.series_reader(ERROR).rows()) == [("m", "m", "", "0", "Internal")]
        assert [labels[1] for labels in instance.memory.series_reader(ATTEMPTS).rows()] == ["m", "other"]


def test_a_child_sees_the_stopping_word(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        assert not instance.words.stopping
        pid = os.fork()
        if pid == 0:
            instance.words.stop()
            os._exit(0)
        os.waitpid(pid, 0)
        assert instance.words.stopping


def test_a_packet_pipe_gives_one_frame_per_read() -> None:
    pipe = packet_pipe()
    os.write(pipe.writer, b"one")
    os.write(pipe.writer, b"two")
    assert [os.read(pipe.reader, 4096), os.read(pipe.reader, 4096)] == [b"one", b"two"]
    os.close(pipe.reader)
    os.close(pipe.writer)
