"""The README shows what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_plugin_that_it_shows_is_the_one_that_is_shipped() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert shown in (ROOT / "deploy/plugins/same_zone.py").read_text()


def test_every_command_that_it_gives_is_run_by_ci() -> None:
    ci = (ROOT / ".ci/run").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    commands = [re.split(r"  +#", line)[0].strip() for block in blocks for line in block.splitlines()]
    assert commands
    for command in commands:
        assert re.sub(r"=.*", "", command) in ci, f"{command}: .ci/run does not run it"


def test_every_file_that_it_names_is_there() -> None:
    names = re.findall(r"`((?:deploy|epp|shm|workers|tests|loadtest)/[\w/.]+)`", README)
    assert names
    for name in names:
        assert (ROOT / name).exists(), name
