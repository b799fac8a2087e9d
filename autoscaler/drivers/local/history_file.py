"""Stores the histories of models across restarts, in one file of the state directory. I/O.

Monotonic times are meaningless to another process, so they are stored relative to the time of writing, with that time
in Unix seconds. The file is replaced atomically, at most once a minute and at shutdown. An unreadable file is moved
aside and reported, and the histories start empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from autoscaler.contract import ModelName
from autoscaler.drivers.local.state_directory import StateDirectory, move_aside, replace_file
from autoscaler.state.world import History

EVERY_S = 60.0
MOMENTS = (
    "last_activity_s",
    "refused_cold_s",
    "woken_s",
    "first_try_s",
    "served_until_s",
    "stopped_idle_s",
    "hold_until_s",
    "retry_at_s",
    "refused_until_s",
)
"""Fields of `History` that are times and are converted between clocks. 0.0 and None mean `never`."""
FORGOTTEN = ("peaks",)
"""Fields that depend on the old clock and are not stored; they fill again within one idle window."""


class _File(msgspec.Struct, frozen=True):
    saved_unix_s: float
    histories: dict[ModelName, History]
    """Times are relative to the time of saving: negative is past."""


class HistoryFile:
    """Stores histories. `clock` is their monotonic clock; `wall` returns Unix seconds."""

    def __init__(self, state: StateDirectory, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._path: Path = state.path / "histories.json"
        self._clock = clock
        self._wall = wall
        self._saved_s: float | None = None

    def save(self, histories: Mapping[ModelName, History], *, at_once: bool = False) -> bool:
        """Write the histories, unless written less than a minute ago; return whether written. Raises `OSError`."""
        now_s = self._clock()
        if not at_once and self._saved_s is not None and now_s - self._saved_s < EVERY_S:
            return False
        moved = {name: _move(history, -now_s) for name, history in histories.items()}
        replace_file(self._path, msgspec.json.encode(_File(self._wall(), moved)))
        self._saved_s = now_s
        return True

    def load(self) -> tuple[dict[ModelName, History], str]:
        """Return (the histories in this process's clock, one line if the file was unreadable and moved aside)."""
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError) as error:
            moved = move_aside(self._path)
            return {}, f"{self._path} cannot be read ({error}): {moved}; the histories of models start empty"
        saved_s = self._clock() - max(0.0, self._wall() - file.saved_unix_s)
        return {name: _move(history, saved_s) for name, history in file.histories.items()}, ""


def _move(history: History, by_s: float) -> History:
    moments = {name: (value + by_s) or -1e-9 for name in MOMENTS if (value := getattr(history, name))}
    return msgspec.structs.replace(history, **moments, **dict.fromkeys(FORGOTTEN, ()))
