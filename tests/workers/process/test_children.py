"""The record of children: pids, ends by cause, and the CPU time of those that have ended."""

import os
import signal

from tests.cases import cases
from workers.host.exit_codes import ExitCode
from workers.process.children import Children, EndCause, cause_of


@cases(
    ("code", "hung", "cause"),
    [
        (ExitCode.OK, False, EndCause.DONE),
        (ExitCode.OK, True, EndCause.DONE),
        (ExitCode.RECYCLED, False, EndCause.MEMORY),
        (ExitCode.BOOT_FAILED, False, EndCause.BOOT_FAILED),
        (ExitCode.FAULT, False, EndCause.FAULT),
        (200, False, EndCause.FAULT),
        (-signal.SIGSEGV, False, EndCause.SIGNAL),
        (-signal.SIGKILL, False, EndCause.SIGNAL),
        (-signal.SIGKILL, True, EndCause.HUNG),
        (-signal.SIGABRT, True, EndCause.HUNG),
    ],
)
def test_each_end_has_a_cause(code: int, hung: bool, cause: EndCause) -> None:
    assert cause_of(code, hung=hung) is cause


def test_a_successor_adds_to_the_counts_of_its_predecessor_and_other_ordinals_keep_theirs() -> None:
    children = Children(3)
    children.started(1, 70)
    assert (children.pid(1), children.pid(0), children.pid(2)) == (70, 0, 0)
    children.ended(1, EndCause.SIGNAL, 1.5)
    assert children.pid(1) == 0
    children.started(1, 71)
    children.ended(1, EndCause.SIGNAL, 0.25)
    children.started(1, 72)
    children.ended(1, EndCause.DONE, 0.25)
    assert children.ended_cpu_s(1) == 2.0
    assert children.ends(1) == dict.fromkeys(EndCause, 0) | {EndCause.SIGNAL: 2, EndCause.DONE: 1}
    assert not any(children.ends(0).values()) and not any(children.ends(2).values())


def test_a_child_reads_what_the_parent_notes_after_the_fork() -> None:
    children = Children(2)
    reader, writer = os.pipe()
    noted, note = os.pipe()
    child = os.fork()
    if not child:
        os.read(noted, 1)
        os.write(writer, f"{children.pid(1)}".encode())
        os._exit(0)
    children.started(1, 123)
    os.write(note, b"x")
    os.waitpid(child, 0)
    assert os.read(reader, 64).decode() == "123"
    for descriptor in (reader, writer, noted, note):
        os.close(descriptor)
