"""What of the engines is installed on this machine. I/O: looks along PATH and at what this Python could import.

Owns the look, which is made once at start; it imports and starts no engine.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec


def available() -> dict[str, str]:
    """Name -> path, as `launch` wants it; an engine that is a Python package is found in this Python."""
    programs = {name: shutil.which(name) for name in ("llama-server", "vllm", "ollama")}
    packages = {name: sys.executable for name in ("xllamacpp", "sglang") if find_spec(name)}
    return {name: path for name, path in programs.items() if path} | packages
