"""Each compiled module can be the first to be imported.

mypyc looks up an imported class in the module that defines it, and not in the module that it is imported from. If no other compiled
module has imported the defining module, the class is missing.
"""

import subprocess
import sys


def test_each_compiled_module_can_be_imported_first() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.compiled.alone"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
