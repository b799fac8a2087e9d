"""What of the engines is installed on this machine. I/O: looks along PATH and at what this Python could import.

Owns the look, which is made once at start; it imports and starts no engine. Whether the llama extra was built for GPUs
only the wheel itself can say: that question loads it, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

SAYS_S_MAX = 60.0
"""Of the question below, which takes 0.1 s without a GPU."""
_DEVICES = "import xllamacpp; print(*(one['type'].name for one in xllamacpp.get_device_info()))"


def find_installed_programs() -> dict[str, str]:
    """Name -> path, as `launch` wants it; an engine that is a Python package is found in this Python."""
    programs = {name: shutil.which(name) for name in ("llama-server", "vllm", "ollama")}
    packages = {name: sys.executable for name in ("xllamacpp", "sglang") if find_spec(name)}
    return {name: path for name, path in programs.items() if path} | packages


def computes_on_cpu_only(python: str) -> bool:
    """Whether the xllamacpp of this Python finds no GPU to compute on. False where it cannot say: its starts will."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _DEVICES], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
            timeout=SAYS_S_MAX, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},  # one GPU is enough, and quicker
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    return "GPU" not in asked.stdout  # GGML_BACKEND_DEVICE_TYPE_GPU, _IGPU
