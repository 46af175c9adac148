"""Tests of reports from children to the parent."""

import os
from pathlib import Path

from tests.workers.instances import made


def test_children_report_and_torn_reports_are_skipped(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        instance.reports.ready(2)
        os.write(instance.pipes.reports.writer, b"\xff")
        instance.reports.failed(1, "x" * 10_000)
        ready, failed = instance.reports.received()
        assert (ready.ordinal, ready.pid, ready.text) == (2, os.getpid(), "")
        assert failed.ordinal == 1
        assert 100 < len(failed.text) < 4096
        assert instance.reports.received() == []
