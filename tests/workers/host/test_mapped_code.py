"""What is given back of programs and libraries: nothing that was written, and a process goes on as before."""

import re
import subprocess
import sys
from pathlib import Path

from workers.host.mapped_code import unwritten

SMAPS = """\
55d0-55d1 r--p 00000000 08:01 11                         /usr/bin/python
Rss:                   4 kB
Anonymous:             0 kB
55d1-55d9 r-xp 00001000 08:01 11                         /usr/bin/python
Anonymous:             0 kB
55d9-55da r--p 00009000 08:01 11                         /usr/bin/python
Anonymous:             4 kB
55da-55db rw-p 0000a000 08:01 11                         /usr/bin/python
Anonymous:             0 kB
7000-7001 r--s 00000000 00:05 12                         /dev/shm/state
Anonymous:             0 kB
7002-7003 r--p 00000000 00:00 0
Anonymous:             0 kB
7004-7005 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
7006-7007 ---p 00000000 08:01 13                         /lib/a b.so
Anonymous:             0 kB
7008-7009 r-xp 00000000 08:01 13                         /lib/a b.so
Anonymous:             0 kB
700a-700b r-xp 00000000 08:01 13                         /lib/c.so (deleted)
Anonymous:             0 kB
"""

PROCESS = """
import numpy as np
from workers.host import mapped_code

def mapped():
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssFile"))

def computed():
    return float(np.linalg.det(np.arange(9.0).reshape(3, 3) ** 2)), sorted(np.random.default_rng(3).random(5).tolist())

first, before = computed(), mapped()
mapped_code.give_back()
assert mapped() >= before - 64, "nothing is given back before it was noted"
mapped_code.note()
mapped_code.give_back()
after = mapped()
assert computed() == first
print(before, after)
"""


def test_only_files_that_were_not_and_cannot_be_written_are_given_back() -> None:
    assert list(unwritten(SMAPS)) == [(0x55D0, 1), (0x55D1, 8), (0x7008, 1)]


def test_a_process_computes_the_same_after_it_gave_its_code_back() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", PROCESS], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after = map(int, re.findall(r"\d+", done.stdout))
    assert after < before / 2
