"""Checks what the GPU run requires of a machine, without importing torch; standard library only.

Each problem is one line that names the missing item and the skipped step.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGES = {"msgspec": "msgspec", "click": "click", "yaml": "PyYAML", "uvloop": "uvloop", "httptools": "httptools",
            "zstandard": "zstandard", "oras": "oras", "rich": "rich", "aiohttp": "aiohttp", "psutil": "psutil",
            "prometheus_client": "prometheus-client", "pynvml": "nvidia-ml-py", "cryptography": "cryptography",
            "numpy": "numpy"}  # fmt: skip
"""Import name -> package name of Pilotlight's own dependencies."""
PYTHON_LEAST, TRANSFORMERS_LEAST = (3, 11), (4, 56)
DRIVER = "libcuda.so.1"
COMPILERS = ("c++", "g++", "clang++")
"""C++ compilers that CMake looks for."""


class Found(NamedTuple):
    """`fatal`: lines that end the run. `skipped`: lines that name a step that is left out."""

    fatal: tuple[str, ...]
    skipped: tuple[str, ...]
    nvcc: str


def check(*, simulated: bool, driver: str = DRIVER) -> Found:
    """Check Python, the driver, torch, transformers, nvcc and what a build with it needs."""
    fatal, skipped = [], []
    if sys.version_info[:2] < PYTHON_LEAST:
        fatal.append("Python 3.11 or newer is needed; this is " + ".".join(map(str, sys.version_info[:2])))
    if simulated:
        return Found(tuple(fatal), (), "")
    supported = driver_cuda(driver)
    if supported is None:
        fatal.append(
            f"no NVIDIA driver: {driver} cannot be loaded, so all steps are skipped; --simulate runs without a GPU"
        )
    needed = torch_cuda()
    if needed is None:
        fatal.append("no PyTorch with CUDA in this Python, so all steps are skipped: pip install torch")
    elif supported is not None and supported[0] < needed[0]:
        fatal.append(
            f"the NVIDIA driver is too old: it supports CUDA {supported[0]}.{supported[1]}, and this PyTorch needs "
            f"CUDA {needed[0]}.{needed[1]}, so all steps are skipped; install a newer driver or an older PyTorch"
        )
    transformers = _stated("transformers", "__init__.py", "__version__")
    if transformers is None:
        fatal.append("no transformers in this Python, so all steps are skipped: pip install transformers")
    elif transformers < TRANSFORMERS_LEAST:
        fatal.append(
            f"transformers {transformers[0]}.{transformers[1]} is too old, so all steps are skipped: "
            "pip install --upgrade transformers (4.56 or newer)"
        )
    nvcc = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin") or ""
    if not nvcc:
        skipped.append("no nvcc on the PATH or in /usr/local/cuda/bin: the steps with llama.cpp are skipped")
    elif shutil.which("cmake") is None:
        skipped.append("no cmake on the PATH: the steps with llama.cpp are skipped")
        nvcc = ""
    elif not os.environ.get("CXX") and not any(map(shutil.which, COMPILERS)):
        skipped.append("no C++ compiler on the PATH, which nvcc needs: the steps with llama.cpp are skipped")
        nvcc = ""
    return Found(tuple(fatal), tuple(skipped), nvcc)


def missing_packages() -> list[str]:
    """Names of packages that Pilotlight needs and this Python lacks."""
    return [package for name, package in PACKAGES.items() if importlib.util.find_spec(name) is None]


def driver_cuda(library: str = DRIVER) -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports; None: there is no driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that PyTorch was built with; None: there is no PyTorch, or it was built without CUDA."""
    return _stated("torch", "version.py", "cuda")


def _stated(package: str, file: str, variable: str) -> tuple[int, int] | None:
    """The version that a file of a package assigns to a variable, without importing the package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / file).read_text()
    match = re.search(rf"^{variable}\b.*= ['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return None if match is None else (int(match[1]), int(match[2]))
