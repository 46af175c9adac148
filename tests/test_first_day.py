"""The script of the first day reads pages and compares outputs as it says."""

from pathlib import Path

import pytest

from tests import first_day
from tests.first_day import Block, Failed, Shell

PAGE = """# Title

```sh
one \\
  two
three
```

```text
first …
last
```

<!-- not run: it needs a cluster -->

```sh
kubectl apply
```

```python
print()
```

```sh
make test
make lint ARGS=x
```
"""


def test_a_block_has_its_commands_its_output_and_the_reason_why_it_does_not_run() -> None:
    first, second, third = first_day.blocks("page.md", PAGE)
    assert first_day.commands(first.text) == ["one    two", "three"]
    assert first.expected == ("first …", "last")
    assert (first.line, first.why_not, first.targets) == (4, "", [])
    assert (second.expected, second.why_not) == ((), "it needs a cluster")
    assert third.targets == ["test", "lint"]


@pytest.mark.parametrize(
    ("expected", "output", "absent"),
    [
        (["a … c", "d"], "a b c\nx\n  d\n", None),
        (["a  b"], "a b", None),
        (["a"], "\x1b[31ma\x1b[0m", None),
        (["…"], "", None),
        (["d", "a"], "a\nd\n", "a"),
        (["a.c"], "abc", "a.c"),
    ],
)
def test_expected_lines_must_come_in_order(expected: list[str], output: str, absent: str | None) -> None:
    assert first_day.missing(expected, output) == absent


def block(text: str, *expected: str) -> Block:
    return Block("page.md", 1, text, expected, "")


def test_a_block_runs_in_the_shell_of_the_blocks_before_it(tmp_path: Path) -> None:
    shell = Shell(tmp_path, tmp_path)
    try:
        first_day.check(shell, block("word=hello\n"))
        first_day.check(shell, block("(echo later) &\necho $word\n", "hello"))
        first_day.check(shell, block("cat <<'END'\nx\nEND\n", "x"))
        with pytest.raises(Failed, match="false: exit code 1"):
            first_day.check(shell, block("false\ntrue\n"))
        with pytest.raises(Failed, match="shows no output"):
            first_day.check(shell, block("echo surprise\n"))
    finally:
        shell.close()


def test_a_line_that_does_not_come_fails_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_day, "OUTPUT_S", 0.0)
    shell = Shell(tmp_path, tmp_path)
    try:
        with pytest.raises(Failed, match="lacks the line 'b'"):
            first_day.check(shell, block("echo a\n", "b"))
    finally:
        shell.close()


def test_a_target_needs_a_step_of_ci() -> None:
    first_day.check_elsewhere(block("make test\n"), "step make test")
    with pytest.raises(Failed, match="no step for make lint"):
        first_day.check_elsewhere(block("make lint\n"), "step make test")


def test_the_way_in_is_short() -> None:
    first_day.check_way_in([block("a\ncurl x\nb\n")])
    with pytest.raises(Failed, match="6 commands"):
        first_day.check_way_in([block("a\n" * 6 + "curl x\n")])
    with pytest.raises(Failed, match="6 commands"):
        first_day.check_way_in([block("a\n")])


def test_the_pages_are_those_of_the_readme() -> None:
    found = first_day.pages()
    assert found[0] == "README.md"
    assert {"docs/operations.md", "docs/plugins.md", "CONTRIBUTING.md"} <= set(found)
