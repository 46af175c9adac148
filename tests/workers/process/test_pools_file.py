"""A pools file and the configurations that it names, as they are read from files."""

from pathlib import Path

import pytest

from epp.config.findings import ConfigErrors
from epp.config.load import load
from workers.process.loading import CONFIG_BYTES_MAX, PoolText, read_configurations, read_pools

TEXT = """\
pools:
- {name: built-in, port: 1}
- {name: file, port: 2, configFile: sub/a.yaml}
- {name: again, port: 3, configFile: sub/a.yaml}
- name: inside
  port: 4
  config: |
    plugins:
    - {type: queue-scrorer}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "pools.yaml"
    path.write_text(text)
    return str(path)


def test_paths_of_configurations_are_relative_to_the_pools_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text("plugins: []")
    found, errors = read_configurations(read_pools(written(tmp_path, TEXT)))
    built_in, file, again, inside = found
    assert (built_in, file, again, errors) == (PoolText(None, ""), PoolText("plugins: []", f"{tmp_path}/sub/a.yaml"), file, [])
    assert inside is not None and inside.source == f"{tmp_path}/pools.yaml"


def test_an_error_in_a_configuration_inside_the_file_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT.replace(", configFile: sub/a.yaml", ""))
    inside = read_configurations(read_pools(path))[0][-1]
    assert inside is not None
    with pytest.raises(ConfigErrors) as refused:
        load(*inside)
    assert str(refused.value.errors[0]).startswith(f"{path}:9:10: error[unknown-type]: plugin type 'queue-scrorer'")


def test_a_missing_configuration_is_an_error_of_its_pools_only(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    found, errors = read_configurations(read_pools(path))
    missing = f"the file {tmp_path}/sub/a.yaml cannot be read: No such file or directory"
    assert [text is None for text in found] == [False, True, True, False]
    assert [str(error) for error in errors] == [
        f"{path}:3:37: error[unreadable]: pool 'file': {missing}",
        f"{path}:4:38: error[unreadable]: pool 'again': {missing}",
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"pools: \xff", "is not UTF-8 at byte 7"),
        (b"#" * (CONFIG_BYTES_MAX + 1), f"has more than {CONFIG_BYTES_MAX} bytes"),
    ],
)
def test_a_pools_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "pools.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigErrors) as refused:
        read_pools(str(path))
    assert [str(error) for error in refused.value.errors] == [f"{path}: error[unreadable]: the file {path} {why}"]
