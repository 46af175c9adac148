"""A build hook for hatchling: adds the compiled modules to a wheel if there is a C compiler. Without one, the wheel is pure Python."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledModules(BuildHookInterface[Any]):
    """Builds the compiled modules and adds their folder to the wheel. With EPP_COMPILED=0, the wheel stays pure Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("EPP_COMPILED") == "0":
            return  # an editable installation needs no build here, because `make` compiles after it
        root = Path(self.root)
        subprocess.run([sys.executable, "-m", "compiled.build"], cwd=root, check=True)
        sys.path.insert(0, self.root)
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
