"""The last report of `epp doctor` about a picker. The command writes it beside the picker's file, and the live page shows it.

The picker cannot check everything itself: it does not know the gateway's configuration, for example. The file is small, and only users
that may write in the run directory can write it. A report that is too long, malformed or older than KEPT_S does not count.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

SUFFIX: Final = ".doctor.json"
BYTES_MAX: Final = 64 << 10
FINDINGS_MAX: Final = 40
TEXT_MAX: Final = 300
PICKER: Final = "picker"
DOCTOR: Final = "doctor"
ERROR: Final = "error"
WARNING: Final = "warning"
KEPT_S: Final = 3600.0


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong. `evidence`: what shows it. `fix`: what to do, with a command where there is one.

    `found_by`: the picker itself, or `epp doctor`.
    """

    rule: str
    severity: str
    title: str
    evidence: str
    fix: str
    found_by: str = PICKER


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of `epp doctor` has found. `at`: seconds since the epoch. `checked`: the checks that it made."""

    at: float
    checked: Sequence[str]
    findings: Sequence[Finding]


_decode: Final = msgspec.json.Decoder(Report).decode


def write(run_dir: str, instance: str, report: Report) -> None:
    """Writes the report, with its first FINDINGS_MAX findings and at most TEXT_MAX characters of each text. Raises OSError."""
    kept = [Finding(*(text[:TEXT_MAX] for text in msgspec.structs.astuple(each))) for each in report.findings]
    data = msgspec.json.encode(msgspec.structs.replace(report, findings=kept[:FINDINGS_MAX]))
    path = _path(run_dir, instance)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def read(run_dir: str, instance: str) -> Mapping[str, Any] | None:
    """Returns the report as plain values; None if there is none that counts."""
    try:
        with _path(run_dir, instance).open("rb") as file:
            report = _decode(file.read(BYTES_MAX))
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
    if not 0 <= time.time() - report.at <= KEPT_S:
        return None
    found: Mapping[str, Any] = msgspec.to_builtins(report)
    return found


def _path(run_dir: str, instance: str) -> Path:
    return Path(run_dir, instance + SUFFIX)
