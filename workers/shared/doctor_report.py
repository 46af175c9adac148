"""What `epp doctor` has found about a picker. The command writes it beside the picker's file, and the live page shows it.

The picker cannot check everything itself: it does not know the gateway's configuration, for example. The file is small, and only users that
may write in the run directory can write it. If the file is too long or malformed, readers ignore it. They also ignore a check that is older
than KEPT_S, or of an earlier picker with the same name.
"""

import hashlib
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
NOT_ALLOWED: Final = "not allowed to"  # so begins the text about access that Kubernetes does not grant
KEPT_S: Final = 3600.0


class Finding(msgspec.Struct, frozen=True):
    """One fault. `evidence`: the values that show the fault. `fix`: what to do, with a command if one helps.

    `found_by`: the picker itself, or `epp doctor`. `pool`: the pool that it is about, if there are several.
    """

    rule: str
    severity: str
    title: str
    evidence: str
    fix: str
    found_by: str = PICKER
    pool: str | msgspec.UnsetType = msgspec.UNSET


class Check(msgspec.Struct, frozen=True):
    """The findings of one check. `at`: the time of the check, in seconds since the epoch. `picker`: names the checked picker's start."""

    at: float
    findings: Sequence[Finding]
    picker: str = ""


Report = Mapping[str, Check]  # the last run of each check, by its name
_decode: Final = msgspec.json.Decoder(dict[str, Check]).decode


def write(run_dir: str, instance: str, secret: str, report: Report) -> None:
    """Writes the report. A check that is missing in the report keeps its last result, because not every run knows the gateway's
    configuration.

    `secret`: the secret in the picker's file in the run directory; each start makes a new one. Keeps the first FINDINGS_MAX findings, and
    at most TEXT_MAX characters of each text. Raises OSError.
    """
    room, kept = FINDINGS_MAX, {}
    checks = {**report, **_read(run_dir, instance, secret), **report}  # the checks of this run come first, so that their findings have room
    for name, check in checks.items():
        found = [Finding(**{name: text[:TEXT_MAX] for name, text in msgspec.to_builtins(each).items()}) for each in check.findings[:room]]
        kept[name] = Check(check.at, found, _named(secret))
        room -= len(found)
    path = _path(run_dir, instance)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(kept))
    temporary.replace(path)


def read(run_dir: str, instance: str, secret: str) -> Mapping[str, Any] | None:
    """Returns `checked` (when each check was made) and `findings` as plain values; None if no check is valid: too old, malformed, or of an
    earlier picker.
    """
    report = _read(run_dir, instance, secret)
    if not report:
        return None
    findings = [msgspec.to_builtins(each) for check in report.values() for each in check.findings]
    return {"checked": {name: check.at for name, check in report.items()}, "findings": findings}


def _named(secret: str) -> str:
    """Returns a name of the picker's start that does not reveal the secret."""
    return hashlib.blake2b(secret.encode(), digest_size=8).hexdigest()


def _read(run_dir: str, instance: str, secret: str) -> Report:
    """Returns the valid checks of this picker."""
    try:
        with _path(run_dir, instance).open("rb") as file:
            report = _decode(file.read(BYTES_MAX))
    except (OSError, msgspec.MsgspecError, ValueError):
        return {}
    now, picker = time.time(), _named(secret)
    return {name: check for name, check in report.items() if 0 <= now - check.at <= KEPT_S and check.picker == picker}


def _path(run_dir: str, instance: str) -> Path:
    return Path(run_dir, instance + SUFFIX)
