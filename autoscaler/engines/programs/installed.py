"""Finds the engines installed on this machine. I/O: searches PATH and the packages that this Python could import.

It runs once at start, and imports or starts no engine. Whether the llama extra was built for GPUs is known only to the
wheel itself: that check loads it, in a separate process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

from autoscaler.spec.engines import ENGINES

CHECK_S_MAX = 60.0
"""Timeout of the check below, which takes 0.1 s without a GPU."""
_DEVICES = "import xllamacpp; print(*(one['type'].name for one in xllamacpp.get_device_info()))"


def find_installed_programs() -> dict[str, str]:
    """Return name -> path, as `build_launch_command` expects; engines in Python packages are found in this Python."""
    programs = [program for engine in ENGINES.values() for program in engine.programs]
    paths = {one.found: shutil.which(one.found) for one in programs if not one.package}
    packages = {one.found: sys.executable for one in programs if one.package and find_spec(one.found)}
    return {name: path for name, path in paths.items() if path} | packages


def computes_on_cpu_only(python: str) -> bool:
    """Return whether this Python's xllamacpp finds no GPU for computation.
    False if the check fails: whether it finds one is then seen when an engine starts.
    """
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _DEVICES], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
            timeout=CHECK_S_MAX, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},  # one GPU is enough, and quicker
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return "GPU" not in asked.stdout  # GGML_BACKEND_DEVICE_TYPE_GPU, _IGPU
