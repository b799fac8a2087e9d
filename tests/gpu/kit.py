"""Builds the kit of the GPU run: wheels for a machine without a network, and the source of llama.cpp.

    python -m tests.gpu.kit 3.12     # the Python of that machine; the kit is build/gpu-kit

The wheels are what Pilotlight needs at run time, but for numpy, which transformers brings. The source is the part of
llama.cpp's tree, taken from the source package of xllamacpp, that llama-server is built from.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.llama import SOURCE
from tests.gpu.main import KIT, ROOT

BYTES_MAX = 60 << 20
LEFT_OUT = ("numpy",)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
             "manylinux2010_x86_64", "manylinux1_x86_64", "manylinux_2_12_x86_64", "manylinux_2_5_x86_64")  # fmt: skip
LLAMA_PACKAGE, LLAMA_FOLDER = "xllamacpp", "/thirdparty/llama.cpp/"
KEPT = (
    "CMakeLists.txt",
    "LICENSE",
    "licenses/",
    "cmake/",
    "common/",
    "ggml/",
    "include/",
    "scripts/",
    "src/",
    "tools/",
    "vendor/",
)
DROPPED = re.compile(
    r"ggml/src/ggml-(vulkan|sycl|metal|opencl|hexagon|cann|webgpu|openvino|zdnn|virtgpu|zendnn|et)/"
    r"|tools/ui/(src|static|tests)/|tools/ui/package-lock\.json|tools/server/(tests|bench|webui|public)/|\.(png|gif)$"
)


def main(argv: list[str]) -> int:
    """Build the kit for a version of Python; return the exit status."""
    version = argv[0] if argv else "3.12"
    shutil.rmtree(KIT, ignore_errors=True)
    KIT.mkdir(parents=True)
    wheels(version, KIT)
    source(KIT / SOURCE)
    size = sum(path.stat().st_size for path in KIT.iterdir())
    print(f"{KIT}: {len([*KIT.iterdir()])} files, {size / (1 << 20):.1f} MiB, for Python {version} on x86-64")
    if size > BYTES_MAX:
        print(f"that is more than {BYTES_MAX >> 20} MiB")
        return 1
    return 0


def wheels(version: str, folder: Path) -> None:
    """Download the wheels, in the versions of requirements/dev.lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / "requirements" / "dev.lock").read_text()
    locked = re.findall(r"^([A-Za-z0-9_.-]+==[^ ;\\]+)", lock, re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(locked))
        constraints.flush()
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        words = ["--only-binary", ":all:", "--python-version", version, "--implementation", "cp", *platforms]
        _pip(*words, "--constraint", constraints.name, "--dest", str(folder), *project["dependencies"])
    for name in LEFT_OUT:
        for path in folder.glob(f"{name}-*.whl"):
            path.unlink()


def source(target: Path) -> None:
    """Pack the required part of llama.cpp."""
    lock = (ROOT / "requirements" / "dev.lock").read_text()
    (pinned,) = re.findall(rf"^{LLAMA_PACKAGE}==[^ ;\\]+", lock, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        _pip("--no-deps", "--no-binary", LLAMA_PACKAGE, "--dest", folder, pinned)
        (package,) = Path(folder).glob("*.tar.gz")
        pack(package, target)


def pack(package: Path, target: Path) -> None:
    """Copy the required files of a source package into an archive of their own."""
    with tarfile.open(package) as archive, tarfile.open(target, "w:xz") as packed:
        for member, name in _needed(archive):
            one = tarfile.TarInfo(name)  # a new one: a long name of the old one would stay in its extended header
            one.size, one.mode, one.mtime = member.size, member.mode, member.mtime
            packed.addfile(one, archive.extractfile(member))


def _needed(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Files of the tree, and their names in it."""
    for member in archive:
        name = member.name.partition(LLAMA_FOLDER)[2]
        if member.isfile() and name.startswith(KEPT) and not DROPPED.search(name):
            yield member, name


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *words], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
