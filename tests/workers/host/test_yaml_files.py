"""The faults of files as fields of the log."""

from typing import Any

import pytest

from workers.host.yaml_files import log_fields


@pytest.mark.parametrize(
    ("fault", "path", "fields"),
    [
        ("/d/e.yaml:3: port: 0", "/d/e.yaml", {"file": "/d/e.yaml", "line": 3, "reason": "port: 0"}),
        ("/d/o.yaml:3: a\nb", "/d", {"file": "/d/o.yaml", "line": 3, "reason": "a\nb"}),
        ("/d/e.yaml: cannot be read: gone", "/d/e.yaml", {"file": "/d/e.yaml", "reason": "cannot be read: gone"}),
        ("/d: 1/e.yaml:3: wrong", "/d: 1/e.yaml", {"file": "/d: 1/e.yaml", "line": 3, "reason": "wrong"}),
        ("/d/e.yaml:0: wrong", "/d/e.yaml", {"file": "/d/e.yaml", "reason": "wrong"}),
        ("wrong", "/d/e.yaml", {"file": "/d/e.yaml", "reason": "wrong"}),
    ],
)
def test_file_line_and_reason_of_a_fault_are_separate_fields(fault: str, path: str, fields: dict[str, Any]) -> None:
    assert log_fields(fault, path) == fields
