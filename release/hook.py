"""A build hook for hatchling: adds the commit to wheels and sdists, and with EPP_COMPILED=1 the compiled modules to a wheel.

Without EPP_COMPILED=1 a wheel is pure Python, so that `pip install .` takes seconds and needs no compiler.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILERS: Final = ["mypy>=2.4,<3", "msgspec>=0.20", "setuptools>=80", "numpy>=2.0"]  # mypyc reads the types of msgspec
NOTE: Final = "EPP_COMPILED=1 was not set when it was built"


class BuildFiles(BuildHookInterface[Any]):
    """Adds what is not in the source tree."""

    def dependencies(self) -> list[str]:
        """Returns what pip installs for the build beside hatchling."""
        return COMPILERS if self._compiles() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files. Raises RuntimeError if the modules are wanted and cannot be compiled."""
        if version == "editable":
            return  # an editable installation needs no build here, because `make` compiles after it
        sys.path.insert(0, self.root)
        build_data["scratch"] = tempfile.mkdtemp()
        if self._compiles():
            self._add_modules(build_data)
        elif self.target_name == "wheel":
            self._add_text(build_data, "compiled/built/not-built.txt", NOTE)
        self._add_commit(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if "scratch" in build_data:
            shutil.rmtree(build_data["scratch"])

    def _compiles(self) -> bool:
        return self.target_name == "wheel" and os.environ.get("EPP_COMPILED") == "1"

    def _add_text(self, build_data: dict[str, Any], path: str, text: str) -> None:
        file = Path(build_data["scratch"], Path(path).name)
        file.write_text(text)
        file.chmod(0o644)
        build_data["force_include"][str(file)] = path

    def _add_commit(self, build_data: dict[str, Any]) -> None:
        from workers.host.build import RECORDED, commit

        root = Path(self.root)
        if not (root / RECORDED).exists() and (found := commit(source=root)):  # an sdist has it already
            self._add_text(build_data, RECORDED, f"{found}\n")

    def _add_modules(self, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        subprocess.run([sys.executable, "-m", "compiled.build"], cwd=root, check=True)
        from compiled.finder import REASON, key

        built = root / "compiled" / "built"
        folder = built / key(root)
        if not folder.is_dir():
            raise RuntimeError(f"EPP_COMPILED=1, and nothing was compiled: {(built / REASON).read_text()}")
        for file in folder.iterdir():
            build_data["force_include"][str(file)] = f"compiled/built/{folder.name}/{file.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
