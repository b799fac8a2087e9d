"""Opens weight files, and checks that safetensors and GGUF files begin as their suffix promises. I/O.

Engines load both formats as numbers only, so a pickle or an archive with such a name must not pass. Artifacts accepted
with `allow_unsafe` are checked, too: no engine can use a mislabelled file.

Formats: https://github.com/huggingface/safetensors#format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from artifacts import file_kinds as kinds
from artifacts.dialects.artifact_contents import RefusedError

HEAD_BYTES = 9


def find_mismatch(path: str, head: bytes, size: int) -> str:
    """Return why a file of `size` bytes that begins with `head` does not match its suffix; empty if it does."""
    kind = kinds.classify_file(path)
    form = "" if kind is None else kind.form
    if form == "gguf" and not head.startswith(b"GGUF"):
        return "it is not a GGUF file: it does not begin with GGUF"
    if form == "safetensors":
        header_bytes = int.from_bytes(head[:8], "little")
        if len(head) < HEAD_BYTES or head[8:9] != b"{" or header_bytes > size - 8:
            return "it is not a safetensors file: it does not begin with the length of a header in JSON"
    return ""


def open_regular_file(path: Path | str) -> FileIO:
    """Open a file for reading. Raises OSError, also for FIFOs and devices, where opening or reading could block."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return FileIO(number)


def check_magic(files: Iterable[tuple[str, Path]]) -> None:
    """Check files given as (artifact path, path on disk). Raises OSError, and RefusedError for a mislabelled file."""
    for path, at in files:
        with open_regular_file(at) as file:
            head = file.read(HEAD_BYTES)
        if why := find_mismatch(path, head, at.stat().st_size):
            raise RefusedError(f"{path}: {why}")
