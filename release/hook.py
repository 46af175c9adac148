"""A build hook for hatchling: adds the compiled modules to a wheel if there is a C compiler, and the commit to wheels and sdists.

Without a compiler, the wheel is pure Python.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildFiles(BuildHookInterface[Any]):
    """Adds what is not in the source tree. With EPP_COMPILED=0, a wheel stays pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # an editable installation needs no build here, because `make` compiles after it
        sys.path.insert(0, self.root)
        self._add_commit(build_data)
        if self.target_name == "wheel" and os.environ.get("EPP_COMPILED") != "0":
            self._add_modules(build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if "commit_file" in build_data:
            os.unlink(build_data["commit_file"])

    def _add_commit(self, build_data: dict[str, Any]) -> None:
        from workers.host.build import RECORDED, commit

        root = Path(self.root)
        if (root / RECORDED).exists() or not (found := commit(source=root)):
            return  # an sdist has it already
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write(f"{found}\n")
        os.chmod(file.name, 0o644)
        build_data["force_include"][file.name] = RECORDED
        build_data["commit_file"] = file.name

    def _add_modules(self, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        subprocess.run([sys.executable, "-m", "compiled.build"], cwd=root, check=True)
        from compiled.finder import REASON, key

        built = root / "compiled" / "built"
        folder = built / key(root)
        if not folder.is_dir():
            build_data["force_include"][str(built / REASON)] = f"compiled/built/{REASON}"
            return
        for file in folder.iterdir():
            build_data["force_include"][str(file)] = f"compiled/built/{folder.name}/{file.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
