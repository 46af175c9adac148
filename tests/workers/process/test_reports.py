"""Tests of reports from children to the parent."""

import os
from pathlib import Path

from tests.workers.instances import made
from workers.process.reports import Report


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


def test_a_report_that_finds_the_pipe_full_is_sent_again(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        reports = instance.reports
        for number in range(64):  # the default pipe has room for 16
            reports.adopted(1, 2, number)
        reports.ready(2)
        reports.leaving(2)
        assert not [each for each in reports.received() if each.ordinal == 2]
        reports.send_again()
        assert reports.received() == [Report(2, os.getpid()), Report(2, os.getpid(), leaving=True)]
        reports.send_again()
        assert reports.received() == []
