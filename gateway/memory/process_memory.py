"""Memory use and memory limit of this process. I/O: reads /proc and the cgroup files, and calls the allocator.

Sources: the resident set (proc(5), statm), and the limit of the process's cgroup, version 2 or 1
(https://docs.kernel.org/admin-guide/cgroup-v2.html). Without these files there is no figure and no limit.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
STATM = Path("/proc/self/statm")
UNLIMITED_BYTES = 1 << 60
"""Version 1 reports `no limit` as a number near 2^63."""


def resident_bytes() -> int | None:
    """Return the resident set size of this process; None if it is unknown."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _allocator() -> Callable[[int], object]:
    """Return glibc's malloc_trim(3), which returns free pages to the kernel. Other allocators do so by themselves."""
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return bool
    return trim


give_back = _allocator()
"""give_back(0) returns freed memory to the kernel. It takes about 0.1 ms per MiB."""


def limit_bytes(root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the lowest limit of this process's cgroup and its ancestors; None if there is none."""
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
    """Return the limits from `path` up to the root of its hierarchy (a container sees its own cgroup as the root)."""
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
