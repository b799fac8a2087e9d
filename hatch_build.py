"""Builds the compiled wheel: the modules that carry every byte, translated to C by mypyc (MIT) from the same source.

Off by default (a wheel is then pure Python); `HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 python -m build --wheel` or `make wheel`
turns it on. Needs a C compiler, Python's headers, mypy and setuptools, in addition to hatchling. Writes nothing into
the source tree.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KEPT_MAX = 4
"""Compiled gateways in the cache; the oldest are removed."""


class CompiledBuildHook(BuildHookInterface[Any]):
    """Puts an extension module next to each source that pyproject.toml lists under `compiled`."""

    def dependencies(self) -> list[str]:
        """Return the requirements of an isolated build in addition to hatchling."""
        return ["mypy", "setuptools"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules and add the results to the files that hatchling packs."""
        if version == "editable":
            return
        made = cached(Path(self.root), self.config["compiled"])
        build_data["force_include"].update(made)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def cached(root: Path, modules: list[str]) -> dict[str, str]:
    """As `compiled`; reuses the extensions of an equal source in the folder `COMPILED_CACHE`, if it is set."""
    cache = os.environ.get("COMPILED_CACHE")
    if not cache:
        return compiled(root, modules, Path(mkdtemp(prefix="pilotlight-build-")))
    kept = Path(cache) / f"compiled-{key(root, modules)}"
    if kept.exists():
        os.utime(kept)  # the oldest are removed
    else:
        made = compiled(root, modules, Path(mkdtemp(prefix="pilotlight-build-")))
        partial = Path(mkdtemp(prefix="partial-", dir=cache))
        for path, name in made.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, partial / name)
        try:
            partial.rename(kept)
        except OSError:  # another build was faster
            shutil.rmtree(partial)
        for old in sorted(Path(cache).glob("compiled-*"), key=lambda path: path.stat().st_mtime)[:-KEPT_MAX]:
            shutil.rmtree(old)
    return {str(path): str(path.relative_to(kept)) for path in kept.rglob("*.so")}


def key(root: Path, modules: list[str]) -> str:
    """A hash of all that the extensions depend on. The gateway imports only itself and the contract (.importlinter)."""
    digest = hashlib.sha256()
    for path in (
        *sorted((root / "gateway").rglob("*.py")),
        root / "autoscaler" / "contract.py",
        root / "hatch_build.py",
    ):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    tools = [version_of("mypy"), version_of("setuptools"), sys.version, platform.machine(), os.environ.get("CFLAGS")]
    digest.update(repr([modules, *tools]).encode() + (root / "pyproject.toml").read_bytes())
    return digest.hexdigest()[:16]


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
