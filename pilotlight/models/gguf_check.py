"""The local GGUF file of a Model: its header, cached, and the reasons why no engine could serve it.

Reports a missing, unreadable or corrupt file with a fix, before an engine fails with a message of its own.
"""

from __future__ import annotations

import functools
import glob
import os
from pathlib import Path

from artifacts.formats import gguf
from autoscaler.engines import ENGINES, EngineError
from autoscaler.spec.model import Model


def load_gguf_header(path: Path) -> gguf.GgufInfo:
    """Return the file's header; cached until the file changes, since parsing a large vocabulary takes tens of ms.

    A split model counts as changed when any of its parts changes or disappears. Raises GgufError and OSError.
    """
    whole = gguf.get_model_stem(path) == path.stem
    parts = [path] if whole else sorted(path.parent.glob(f"{glob.escape(gguf.get_model_stem(path))}-*.gguf"))
    stats = [part.stat() for part in parts]
    return _header(path, tuple((stat.st_mtime_ns, stat.st_size) for stat in stats))


@functools.lru_cache(maxsize=1024)
def _header(path: Path, parts: tuple[tuple[int, int], ...]) -> gguf.GgufInfo:
    del parts  # only a cache key
    return gguf.load_gguf_info(path)


def check_file(model: Model, path: Path) -> None:
    """Raise EngineError with one line that names the file and the fix if the Model's engine could not serve it.

    A `command` engine may interpret `spec.artifact` freely, and Ollama has its own store: for these, only a file named
    `.gguf` is checked.
    """
    engine = ENGINES[model.spec.engine]
    must_be_gguf = path.suffix == ".gguf" or engine.name == "llama.cpp"
    if engine.artifacts == "optional-file" and not must_be_gguf:
        return
    try:
        path.stat()
        readable = os.access(path, os.R_OK)
        if must_be_gguf and readable:
            load_gguf_header(path)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(f"{path} does not exist; put the model there, or correct spec.artifact") from None
    except PermissionError:
        readable = False
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror}; correct spec.artifact, or repair its disk") from None
    except gguf.GgufError as error:
        raise EngineError(f"{error}; put a complete GGUF file there, or correct spec.artifact") from None
    if not readable:
        raise EngineError(f"{path} is not readable; give read permission to the user that runs pilotlight")
