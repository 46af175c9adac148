"""Tests of one child at a time. A helper process forks it, because the test runner has threads."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os; os.environ["OPENBLAS_NUM_THREADS"] = "1"
import random, signal, sys, threading, time
from workers.process import fork
from workers.host.exit_codes import ExitCode

def child(main, closed=()):
    pid = fork.spawn("epp: worker 0", main, closed=closed, failed=lambda text: print("failed:", text, file=sys.stderr))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=30, check=False)


def out(body: str) -> str:
    done = run(body)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_child_exits_with_the_result_of_its_main_and_does_not_return_to_the_parents_code() -> None:
    assert out("print(child(lambda: 7)); print('once')") == "7\nonce"


@pytest.mark.parametrize(("raised", "code"), [("SystemExit(9)", 9), ("SystemExit('text')", 1), ("SystemExit()", 1)])
def test_a_sys_exit_in_the_child_sets_its_exit_code(raised: str, code: int) -> None:
    body = f"def main():\n    raise {raised}\nprint(child(main))"
    assert out(body) == str(code)


def test_an_exception_is_printed_and_reported_and_causes_exit_code_1() -> None:
    done = run("def main():\n    1 / 0\nprint(child(main))")
    assert done.stdout.strip() == "1"
    assert "failed: ZeroDivisionError: division by zero" in done.stderr
    assert "Traceback" in done.stderr


def test_a_process_with_a_second_thread_must_not_fork() -> None:
    body = """
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    child(lambda: 0)
except fork.NotForkSafe as refused:
    print(refused)
os._exit(0)
"""
    done = run(body.replace("os._exit(0)", "sys.stdout.flush(); os._exit(0)"))
    assert "the parent has 2 threads" in done.stdout


def test_the_child_has_the_given_process_name() -> None:
    assert out("print(child(lambda: print(open('/proc/self/comm').read().strip(), flush=True) or 0))").splitlines()[0] == "epp: worker 0"


def test_a_child_ignores_signals_to_the_group_and_does_not_keep_the_parents_handlers() -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: print("the parent's handler"))
signal.signal(signal.SIGUSR1, lambda *_: print("the parent's handler"))
def main():
    os.kill(os.getpid(), signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return 5
print(child(main), signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    assert out(body) == "5 True set()"


def test_random_numbers_differ_between_children() -> None:
    body = """
def main():
    print(random.random(), flush=True)
    return 0
for _ in range(3): child(main)
"""
    assert len(set(out(body).splitlines())) == 3


def test_listed_descriptors_are_closed_in_the_child_and_stay_open_in_the_parent() -> None:
    body = """
reader, writer = os.pipe()
def main():
    try:
        os.fstat(writer)
    except OSError:
        os.fstat(reader)
        return 3
print(child(main, closed=[writer, 999]))
os.fstat(writer)
"""
    assert out(body) == "3"


def test_sigabrt_prints_the_stack_and_ends_the_child() -> None:
    body = """
def somewhere():
    os.kill(os.getpid(), signal.SIGABRT)
print(child(somewhere))
"""
    done = run(body)
    assert done.stdout.strip() == "-6"
    assert "in somewhere" in done.stderr


def test_many_children_leave_no_open_descriptor() -> None:
    body = """
before = len(os.listdir("/proc/self/fd"))
fork.prepare()
for _ in range(100): assert child(lambda: 0) == 0
print(len(os.listdir("/proc/self/fd")) - before)
"""
    assert out(body) == "0"


def test_threads_counts_the_kernels_threads() -> None:
    from workers.process.fork import threads

    assert threads() == len(os.listdir("/proc/self/task"))


def test_a_child_can_end_with_the_process_that_forked_it() -> None:
    body = """
reader, writer = os.pipe()
def main():
    fork.end_with(parent)
    os.write(writer, b"x")
    signal.pause()
if (forker := os.fork()) == 0:
    parent = os.getpid()
    fork.spawn("epp: trial", main, closed=(), failed=print)
    os.read(reader, 1)
    os.kill(parent, signal.SIGKILL)
os.close(writer)
os.waitpid(forker, 0)
print(os.read(reader, 1))  # the end of the file: nobody has the writing end
"""
    assert out(body) == "b''"
