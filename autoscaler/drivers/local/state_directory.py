"""The state directory: records the replicas started here, so that a restarted Pilotlight finds them again. I/O.

* STATE/version: version of this layout; a newer one is rejected
* STATE/installation: id of this installation in the marks of its processes; created once
* STATE/epoch: epoch of the last leader; never reused
* STATE/lock: locked (flock) by the process that owns the directory; contains its pid
* STATE/replicas/: one record per replica, written before its process exists and again with its pid
* STATE/logs/: one log per replica
* STATE/run/: sockets

Files are replaced atomically by renaming a temporary file, so a crash leaves the old or the new content. Content that
must survive a power failure is synced to disk (`durable`): version, installation and epoch. Records are not, because no
process survives a power failure. An unreadable record is moved aside and reported, and is never fatal. If another file
is damaged, `open` fails with the name of the file and the fix.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
from pathlib import Path
from typing import Self
from urllib.parse import quote

import msgspec

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.spec.model import EngineTls
from autoscaler.spec.quantity import whole_number
from autoscaler.state.world import SliceId

VERSION = 1
EPOCH = "epoch"
INSTALLATION = re.compile(r"[0-9a-f]{16}")
TEXT_BYTES_MAX = 64
"""Maximum bytes that are read of version, installation and epoch."""
UNFINISHED = ".new"
"""End of the name of a file that is being written."""
NAME_CHARACTERS_MAX = 150
"""Longer ids are hashed in file names, which may have at most 255 bytes."""


class StateError(Exception):
    """The state directory cannot be used. `str()` is one line with the directory and the fix."""


class InUseError(StateError):
    """Another process owns the directory."""


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to adopt a replica: its spec, the identity of its process, and how to probe it."""

    id: ReplicaId
    model: ModelName
    spec_hash: str
    intent: str
    slices: tuple[SliceId, ...]
    memory_bytes: int
    compute_percent: int = 0
    slots: int = 1
    port: int = 0
    readiness_path: str = "/"
    tls: EngineTls | None = None
    container_client: tuple[str, ...] = ()
    """The client of the container runtime that runs the engine, for example `docker`; empty: there is none."""
    boot: str = ""
    pid: int = 0
    start_ticks: int = 0
    """0: not known yet; the process is found by its mark."""
    was_ready: bool = False
    gpu_pids: tuple[int, ...] = ()
    """Processes that were observed with device memory, for the proof of CLEAN."""


class StateDirectory:
    """One state directory. Create it with `open` (the owner) or `attach` (a process of the owner)."""

    def __init__(self, path: Path, installation: str, lock_fd: int | None) -> None:
        self.path = path
        self.installation = installation
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Create the directory if missing, and own it until `close` or the end of the process. Raises `StateError`."""
        given = Path(path)
        try:
            given.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_version(given)
            lock_fd = _lock(given)
            try:
                _epoch(given)
                for part in ("replicas", "logs", "run"):
                    (given / part).mkdir(mode=0o700, exist_ok=True)
                replace_file(given / "version", f"{VERSION}\n".encode(), durable=True)
                if not (given / "installation").exists():
                    replace_file(given / "installation", secrets.token_hex(8).encode(), durable=True)
                return cls(given, _installation(given), lock_fd)
            except BaseException:
                os.close(lock_fd)
                raise
        except OSError as error:
            why = f"{error.filename or path}: {error.strerror or type(error).__name__}"
            raise StateError(
                f"state directory {path} cannot be used ({why}): name a writable one with --state"
            ) from error

    @classmethod
    def attach(cls, path: str | Path) -> Self:
        """Use a directory that another process owns. Raises `StateError`."""
        given = Path(path)
        try:
            _check_version(given)
            return cls(given, _installation(given), None)
        except OSError as error:
            raise StateError(f"state directory {path} does not exist or cannot be read ({error.strerror})") from error

    def close(self) -> None:
        """Release the ownership."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def next_epoch(self) -> int:
        """Return an epoch above that of any earlier leader; never returned again. Raises `StateError`."""
        epoch = _epoch(self.path) + 1
        try:
            replace_file(self.path / EPOCH, f"{epoch}\n".encode(), durable=True)
        except OSError as error:
            raise StateError(f"{self.path / EPOCH} cannot be written ({error.strerror}): check its disk") from error
        return epoch

    @property
    def mark_prefix(self) -> str:
        """The prefix of the marks of all processes of this installation; the replica's id follows."""
        return f"{self.installation}/"

    def log(self, replica: ReplicaId) -> Path:
        """Return the path of a replica's log."""
        return self.path / "logs" / f"{_file_name(replica)}.log"

    def put(self, record: ReplicaRecord) -> None:
        """Write a record. Raises `OSError`.

        The old one is removed first: ext4 flushes a file to disk when it is renamed over another, which takes
        milliseconds. A crash in between leaves a process without a record, which the next driver kills.
        """
        replace_file(self._record(record.id), msgspec.json.encode(record), over=False)

    def drop(self, replica: ReplicaId) -> None:
        """Remove a record, if there is one. Raises `OSError`."""
        self._record(replica).unlink(missing_ok=True)

    def drop_unfinished(self) -> None:
        """Remove what crashes during `put` left. Call it while no record is written. Raises `OSError`."""
        for path in (self.path / "replicas").glob(f".*{UNFINISHED}"):
            path.unlink(missing_ok=True)

    def records(self) -> tuple[tuple[ReplicaRecord, ...], tuple[str, ...]]:
        """Return (all records, one line for each that could not be read and was moved aside)."""
        good: list[ReplicaRecord] = []
        broken: list[str] = []
        for path in sorted((self.path / "replicas").glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=ReplicaRecord)
                if self._record(record.id) != path:
                    raise ValueError("it names another replica")  # noqa: TRY301 - handled as every other fault of it
                good.append(record)
            except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
                broken.append(f"the record {path} cannot be read ({error}): {move_aside(path)}")
        return tuple(good), tuple(broken)

    def _record(self, replica: ReplicaId) -> Path:
        return self.path / "replicas" / f"{_file_name(replica)}.json"


def _file_name(replica: ReplicaId) -> str:
    name = quote(replica, safe="")
    return name if len(name) <= NAME_CHARACTERS_MAX else hashlib.sha256(replica.encode()).hexdigest()


def replace_file(path: Path, content: bytes, *, over: bool = True, durable: bool = False) -> None:
    """Replace a file atomically, readable by its owner only. Raises `OSError`.

    `over` False: the old file is removed first. `durable`: synced to disk before it replaces the old file, for content
    that must survive a power failure.
    """
    temporary = path.with_name(f".{path.name}{UNFINISHED}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(fd)
    if not over:
        path.unlink(missing_ok=True)
    temporary.rename(path)


def move_aside(path: Path) -> str:
    """Rename an unreadable file to *.broken, or leave it if that fails. Return a description of the result."""
    aside = path.with_suffix(".broken")
    try:
        path.rename(aside)
    except OSError as error:
        return f"it cannot be moved aside either ({error.strerror})"
    return f"moved to {aside}"


def _check_version(path: Path) -> None:
    file = path / "version"
    try:
        text = _text(file)
    except FileNotFoundError:
        return
    number = whole_number(text)
    if not number:
        raise StateError(
            f"{file} contains no layout number: {path} is not a state directory of Pilotlight (name another with "
            f"--state), or it is damaged (write {VERSION} into that file)"
        )
    if number > VERSION:
        raise StateError(
            f"state directory {path} was written by a newer Pilotlight (layout {text}, this version supports "
            f"{VERSION}): upgrade, or name another with --state"
        )


def _installation(path: Path) -> str:
    file = path / "installation"
    name = _text(file)
    if not INSTALLATION.fullmatch(name):
        raise StateError(
            f"state directory {path} is damaged ({file} contains no installation ID): name another with --state, or "
            "remove that file when none of its engines runs"
        )
    return name


def _epoch(path: Path) -> int:
    """Return the epoch of the last leader; 0 before the first."""
    file = path / EPOCH
    try:
        text = _text(file)
    except FileNotFoundError:
        return 0
    number = whole_number(text)
    if number is None:
        raise StateError(
            f"{file} contains no number: write a number into it that is larger than every earlier epoch, such as "
            f"{int(time.time())}"
        )
    return number


def _text(file: Path) -> str:
    """Read one of the small files, with undecodable bytes replaced. Raises `OSError`."""
    with file.open("rb") as opened:
        return opened.read(TEXT_BYTES_MAX).decode(errors="replace").strip()


def _lock(path: Path) -> int:
    """Return the descriptor that holds the lock. Raises `InUseError` if another process holds it, and `OSError`."""
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise InUseError(
            f"another Pilotlight process uses {path} (pid {pid}): stop it, or name another directory with --state"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def serving_pid(state: Path) -> str:
    """Return the pid of the `serve` that holds the lock of the state directory, or an empty string."""
    try:
        pid = (state / "lock").read_text().strip()
    except OSError:
        return ""
    return pid if pid.isdecimal() and Path("/proc", pid).exists() else ""
