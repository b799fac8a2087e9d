"""How much memory this process has, and how much it may have. I/O: reads /proc and the cgroup's files, and asks the
allocator to give back.

Owns where these numbers are: the resident set (proc(5), statm), and the limit of the process's cgroup, version 2 or 1
(https://docs.kernel.org/admin-guide/cgroup-v2.html). Where there is no such file there is no number, and no bound.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
STATM = Path("/proc/self/statm")
UNLIMITED_BYTES = 1 << 60
"""Version 1 says `no limit` as a number near 2^63."""


def resident_bytes() -> int | None:
    """What this process holds of the machine's memory."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _allocator() -> Callable[[int], object]:
    """malloc_trim(3) of glibc, which gives the kernel every whole page that is free. Others do so by themselves."""
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return bool
    return trim


give_back = _allocator()
"""give_back(0): what was allocated and freed is the kernel's again. It takes about 0.1 ms for each MiB."""


def limit_bytes(root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least limit of this process's cgroup and all above it; None without one."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(found, default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """The limits on the way from `path` up to the root of its hierarchy, which a container sees as its own."""
    here = root / path.strip("/")
    found = []
    for folder in (here, *here.parents):
        try:
            text = (folder / name).read_text().strip()
        except OSError:
            text = "max"
        if text.isdigit() and int(text) < UNLIMITED_BYTES:
            found.append(int(text))
        if folder == root:
            break
    return found
