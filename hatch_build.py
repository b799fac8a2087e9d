"""Builds the compiled wheel: the modules that carry every byte, translated to C by mypyc (MIT) from the same source.

Off by default (a wheel is then pure Python); `HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 python -m build --wheel` or `make wheel`
turns it on. Needs a C compiler, Python's headers, and mypy and setuptools beside hatchling. Writes nothing into the
source tree.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledBuildHook(BuildHookInterface[Any]):
    """Puts an extension module beside each source that pyproject.toml names under `compiled`."""

    def dependencies(self) -> list[str]:
        """What an isolated build needs beside hatchling."""
        return ["mypy", "setuptools"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and tells hatchling which files to take."""
        if version == "editable":
            return
        made = compiled(Path(self.root), self.config["compiled"], Path(mkdtemp(prefix="pilotlight-build-")))
        build_data["force_include"].update(made)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compiled(root: Path, modules: list[str], place: Path) -> dict[str, str]:
    """Compiles `modules` (paths below `root`) into `place`; gives each extension's path and its name in the wheel."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    before = Path.cwd()
    os.chdir(root)  # mypy takes a module's name from its path
    try:
        options = ["--config-file", "pyproject.toml", "--follow-imports", "silent", "--cache-dir", str(place / "mypy")]
        extensions = mypycify([*options, *modules], opt_level="3", target_dir=str(place / "c"))
        command = build_ext(Distribution({"name": "pilotlight", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(place / "lib"), str(place / "o")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    made = {str(path): str(path.relative_to(place / "lib")) for path in (place / "lib").rglob("*.so")}
    sys.stderr.write(f"compiled {len(modules)} modules\n")
    return made
