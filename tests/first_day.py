"""Follows the documentation literally, as an operator on the first day: `python -m tests.first_day` (`make test-first-day`).

    README ─▶ the pages that it lists, in order ─▶ blocks of commands ─▶ one bash in a fresh clone ─▶ the output stated beside each

Every `sh` block runs, in one shell for the whole day: what a block leaves running still runs for the next one. Each command must exit
with 0, and the output must have the lines of the `text` block that follows, in that order. In those lines `…` stands for anything,
and a run of blanks for one blank. A block that prints something needs such lines.

Two kinds of blocks do not run here. One has only `make` targets: `.ci/run` must have a step for each. The other has the comment
`<!-- not run: why -->` before it.
"""

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PORTS = (8000, 8001, 8080, 9002, 9003, 9090, 9901)  # of the simulated servers, Envoy and the picker, by default
BLOCK_S = 900.0  # `make install` downloads everything
OUTPUT_S = 30.0  # how long what runs in the background may take to print
END_S = 10.0
POLL_S = 0.05
SHOWN_CHARS = 6_000
ROUTED_COMMANDS_MAX = 6  # from a clone to a routed request

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
_LINK = re.compile(r"\[[^\]]*\]\(([\w./-]+\.md)\)")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TARGET = re.compile(r"make ([a-z][a-z0-9-]*)")


class Block(NamedTuple):
    """One block of commands. `expected`: the lines of the output stated beside it; `why_not`: why it does not run, or ""."""

    page: str
    line: int
    text: str
    expected: tuple[str, ...]
    why_not: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def targets(self) -> list[str]:
        """Returns the block's `make` targets if it has no other command, else an empty list."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        named = [found[1] for line in lines if (found := _TARGET.match(line)) and "&" not in line]
        return named if len(named) == len(lines) else []


class Failed(Exception):
    """A block does not do what the page says."""


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yields the blocks of commands of one page, in order."""
    fences = list(_FENCE.finditer(text))
    for fence, after in itertools.zip_longest(fences, fences[1:]):
        if fence[1] != "sh":
            continue
        beside = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
        reason = _NOT_RUN.search(text[: fence.start()])
        yield Block(
            page,
            text.count("\n", 0, fence.start()) + 2,
            fence[2],
            tuple(after[2].splitlines()) if beside and after is not None else (),
            reason[1] if reason else "",
        )


def pages(root: Path = ROOT) -> list[str]:
    """Returns README, then the pages to which it links, in order, each once."""
    linked = _LINK.findall((root / "README.md").read_text())
    return list(dict.fromkeys(["README.md", "docs/index.md", *linked]))


def commands(text: str) -> list[str]:
    """Returns the commands of a block, one per line. Joins a line that ends with a backslash with the next one."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def missing(expected: Sequence[str], output: str) -> str | None:
    """Returns the first expected line that is not in the output after the lines before it. Returns None if there is no such line."""
    lines = iter([" ".join(line.split()) for line in _ANSI.sub("", output).splitlines()])
    for wanted in expected:
        plain = " ".join(wanted.split())
        if plain in ("", "…"):
            continue
        pattern = re.compile(".*".join(map(re.escape, plain.split("…"))))
        if not any(pattern.fullmatch(line) for line in lines):
            return wanted
    return None


def shown(output: Path) -> str:
    """Returns the output of a block for an error message. Returns only the end if it is long."""
    text = output.read_text(errors="replace")
    return text if len(text) <= SHOWN_CHARS else "… " + text[-SHOWN_CHARS:]


class Shell:
    """Runs all blocks in one bash. Everything that the shell starts is in its process group, and `close` ends the group."""

    def __init__(self, directory: Path, outputs: Path) -> None:
        self._outputs = outputs
        self._done, done = os.pipe()
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=directory,
            stdin=subprocess.PIPE,
            pass_fds=(done,),
            start_new_session=True,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "EPP_"))},
        )
        os.close(done)
        os.set_blocking(self._done, False)
        self._number = done
        self._count = 0

    def run(self, text: str) -> tuple[str, Path]:
        """Runs a block. Returns the command that failed with its exit code, or "", and the file with the output. Raises Failed."""
        self._count += 1
        script, output = (self._outputs / f"{self._count}.{kind}" for kind in ("sh", "out"))
        script.write_text(text)
        assert self._bash.stdin is not None
        self._bash.stdin.write(
            'failed=; trap \'code=$?; [ -n "$failed" ] || failed="$BASH_COMMAND: exit code $code"\' ERR; '
            f"source {script} >{output} 2>&1 </dev/null {self._number}>&-; trap - ERR; "
            f'printf "%s\\0" "$failed" >&{self._number}\n'
        )
        self._bash.stdin.flush()
        return self._answer(output), output

    def _answer(self, output: Path) -> str:
        deadline = time.monotonic() + BLOCK_S
        answer = b""
        while not answer.endswith(b"\0"):
            if time.monotonic() > deadline or self._bash.poll() is not None:
                raise Failed(f"the shell did not come back; the output so far:\n{shown(output)}")
            with contextlib.suppress(BlockingIOError):
                answer += os.read(self._done, 65536)
            time.sleep(POLL_S)
        return answer[:-1].decode()

    def close(self) -> None:
        """Ends the shell and all processes that it has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + END_S
            while self._left(number) and time.monotonic() < deadline:
                number = 0  # asks only whether any is left
                time.sleep(POLL_S)
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait()
        os.close(self._done)

    def _left(self, number: int) -> bool:
        """Sends a signal to the process group. Returns whether any process was left."""
        self._bash.poll()
        try:
            os.killpg(self._bash.pid, number)
        except ProcessLookupError:
            return False
        return True


def check(shell: Shell, block: Block) -> None:
    """Runs a block and compares what it prints. Raises Failed."""
    failed, output = shell.run(block.text)
    if failed:
        raise Failed(f"{failed}; the output:\n{shown(output)}")
    deadline = time.monotonic() + OUTPUT_S
    while (absent := missing(block.expected, output.read_text())) is not None:
        if time.monotonic() > deadline:
            raise Failed(f"the output lacks the line {absent!r}; it is:\n{shown(output)}")
        time.sleep(POLL_S)
    if not block.expected and output.read_text().strip():
        raise Failed(f"it prints something, but the page shows no output beside it; it prints:\n{shown(output)}")


def check_elsewhere(block: Block, ci: str) -> None:
    """Checks that `.ci/run` has a step for each target of a block of `make` targets. Raises Failed."""
    for target in block.targets:
        if not re.search(rf"\bmake {target}\b", ci):
            raise Failed(f".ci/run has no step for make {target}")


def check_way_in(readme: Sequence[Block]) -> None:
    """Checks that few commands lead to a routed request and its explanation. Raises Failed."""
    first = commands(readme[0].text)
    routed = next((n for n, command in enumerate(first, 1) if command.startswith("curl ")), None)
    if routed is None or routed > ROUTED_COMMANDS_MAX or len(first) > ROUTED_COMMANDS_MAX:
        raise Failed(f"it does not lead to a routed request and its explanation in {ROUTED_COMMANDS_MAX} commands")


def follow(directory: Path, only: Sequence[str]) -> int:
    """Follows the pages in a tree. Returns the number of blocks that ran. Raises Failed."""
    ran = 0
    ci = (ROOT / ".ci" / "run").read_text()
    found = {page: list(blocks(page, (directory / page).read_text())) for page in pages(directory)}
    with tempfile.TemporaryDirectory(prefix="first-day-") as outputs:
        shell = Shell(directory, Path(outputs))
        try:
            for page, of_page in found.items():
                for number, block in enumerate(of_page):
                    if only and page not in only and not (page == "README.md" and number == 0):
                        continue
                    ran += _follow(shell, block, ci, of_page if page == "README.md" and number == 0 else None)
        finally:
            shell.close()
    return ran


def _follow(shell: Shell, block: Block, ci: str, way_in: Sequence[Block] | None) -> int:
    started = time.monotonic()
    try:
        if block.why_not:
            print(f"{block.place}: not run: {block.why_not}", flush=True)
            return 0
        if block.targets:
            check_elsewhere(block, ci)
            print(f"{block.place}: steps of .ci/run", flush=True)
            return 0
        if way_in is not None:
            check_way_in(way_in)
        check(shell, block)
    except Failed as failed:
        raise Failed(f"{block.place}: {failed}") from None
    print(f"{block.place}: as stated ({time.monotonic() - started:.0f} s)", flush=True)
    return 1


def files(directory: Path) -> set[Path]:
    """Returns the files at the top of a tree."""
    return {path for path in directory.iterdir() if path.is_file()}


def taken() -> list[int]:
    """Returns the ports in the documentation on which another process listens already."""
    busy = []
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                busy.append(port)
    return busy


def main() -> int:
    line = argparse.ArgumentParser(prog="python -m tests.first_day", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--here", action="store_true", help="use this tree as it is, instead of a fresh clone")
    line.add_argument("pages", nargs="*", help="only these pages, after the way in")
    options = line.parse_args()
    if busy := taken():
        print(f"the documented ports {', '.join(map(str, busy))} are in use; end what listens there", file=sys.stderr)
        return 1
    clone = ROOT if options.here else Path(tempfile.mkdtemp(prefix="first-day-clone-"))
    before = files(clone)
    try:
        if not options.here:
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(clone)], check=True)
        ran = follow(clone, options.pages)
    except Failed as failed:
        print(f"FAILED: {failed}", file=sys.stderr)
        return 1
    finally:
        if options.here:
            for path in files(clone) - before:  # that the pages have the reader write
                path.unlink()
        else:
            shutil.rmtree(clone, ignore_errors=True)
    print(f"the documentation does what it says: {ran} blocks of commands")
    return 0


if __name__ == "__main__":
    sys.exit(main())
