"""Builds the kit of the GPU run: wheels for a machine without a network, and the source of llama.cpp.

    python -m tests.gpu.kit 3.12                          # the Python of that machine; the kit is build/gpu-kit
    python -m tests.gpu.kit 3.12 --without-build-tools    # that machine has cmake

The wheels are what Pilotlight needs at run time, but for numpy, which transformers brings, and cmake and ninja. The
source is the part of llama.cpp's tree, taken from the source package of xllamacpp, that llama-server is built from. The
SHA-256 of each downloaded file must be in a lock file.
"""

from __future__ import annotations

import hashlib
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
BUILD_TOOLS = ("cmake", "ninja")
WITHOUT_TOOLS = "--without-build-tools"
LOCKS = tuple(ROOT / "requirements" / name for name in ("dev.lock", "gpu-kit.lock"))
"""Versions and hashes: of Pilotlight's dependencies and llama.cpp's source, and of the build tools."""
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


class UnlockedFileError(Exception):
    """A downloaded file is not the one that was locked; the text is one line."""


def main(argv: list[str]) -> int:
    """Build the kit for a version of Python; return the exit status."""
    tools = () if WITHOUT_TOOLS in argv else BUILD_TOOLS
    version = next((word for word in argv if word != WITHOUT_TOOLS), "3.12")
    shutil.rmtree(KIT, ignore_errors=True)
    KIT.mkdir(parents=True)
    try:
        wheels(version, KIT, tools)
        source(KIT / SOURCE)
    except UnlockedFileError as error:
        shutil.rmtree(KIT)
        print(error)
        return 1
    size = sum(path.stat().st_size for path in KIT.iterdir())
    print(f"{KIT}: {len([*KIT.iterdir()])} files, {size / (1 << 20):.1f} MiB, for Python {version} on x86-64")
    if size > BYTES_MAX:
        print(f"that is more than {BYTES_MAX >> 20} MiB")
        return 1
    return 0


def wheels(version: str, folder: Path, tools: tuple[str, ...]) -> None:
    """Download the wheels, with those of the build tools, in the locked versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(re.findall(r"^([A-Za-z0-9_.-]+==[^ ;\\]+)", _locks(), re.MULTILINE)))
        constraints.flush()
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        words = ["--only-binary", ":all:", "--python-version", version, "--implementation", "cp", *platforms]
        words += ["--constraint", constraints.name, "--dest", str(folder)]
        _pip(*words, *project["dependencies"], *tools)
    for name in LEFT_OUT:
        for path in folder.glob(f"{name}-*.whl"):
            path.unlink()
    for path in folder.glob("*.whl"):
        verify(path)


def source(target: Path) -> None:
    """Pack the required part of llama.cpp."""
    (pinned,) = re.findall(rf"^{LLAMA_PACKAGE}==[^ ;\\]+", _locks(), re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        _pip("--no-deps", "--no-binary", LLAMA_PACKAGE, "--dest", folder, pinned)
        (package,) = Path(folder).glob("*.tar.gz")
        verify(package)
        pack(package, target)


def verify(path: Path) -> None:
    """Raise UnlockedFileError unless a lock file contains the SHA-256 of the file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if f"sha256:{digest}" not in _locks():
        names = " and ".join(str(lock.relative_to(ROOT)) for lock in LOCKS)
        raise UnlockedFileError(f"{path.name}: its SHA-256 {digest} is not in {names}, so no kit was built")


def _locks() -> str:
    return "\n".join(path.read_text() for path in LOCKS)


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
