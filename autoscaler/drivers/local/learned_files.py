"""Stores the histories of models and the learned placement values across restarts, in the state directory. I/O.

Files are replaced atomically. An unreadable file is moved aside and reported in one line, and its values are learned
again. Monotonic times are meaningless to another process, so STATE/histories.json has them relative to the time of
writing, with that time in Unix seconds; it is written at most once a minute and at shutdown. Each autoscaler of a
cluster has its own STATE/lesson.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from autoscaler.contract import ModelName
from autoscaler.drivers.local.state_directory import StateDirectory, move_aside, replace_file
from autoscaler.exception_handling import FaultReport, attempt_for, raise_fault
from autoscaler.placement.learning.training import decode_placement_values
from autoscaler.state.world import History, PlacementValues

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
"""Fields that depend on the old clock and are not stored; they fill again within one idle timeout."""


class _Histories(msgspec.Struct, frozen=True):
    saved_unix_s: float
    histories: dict[ModelName, History]
    """Times are relative to the time of saving: negative is past."""


class _EncodedHistories(msgspec.Struct, frozen=True):
    """Encodes to the same text as `_Histories`."""

    saved_unix_s: float
    histories: dict[ModelName, msgspec.Raw]


class HistoryFile:
    """Stores histories. `clock` is their monotonic clock; `wall` returns Unix seconds."""

    def __init__(self, state: StateDirectory, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._path: Path = state.path / "histories.json"
        self._clock = clock
        self._wall = wall
        self._saved_s: float | None = None

    def save(
        self, histories: Mapping[ModelName, History], *, at_once: bool = False, fault: FaultReport = raise_fault
    ) -> bool:  # fmt: skip
        """Write the histories, unless written less than a minute ago; return whether written. Raises `OSError`.
        `fault` receives Models whose history raises an exception; the file then lacks them.
        """
        now_s = self._clock()
        if not at_once and self._saved_s is not None and now_s - self._saved_s < EVERY_S:
            return False
        moved: dict[ModelName, msgspec.Raw] = {}
        for name, history in histories.items():
            encoded = attempt_for(name, "histories", fault, partial(_encode, history, now_s))
            if encoded is not None:
                moved[name] = encoded
        replace_file(self._path, msgspec.json.encode(_EncodedHistories(self._wall(), moved)))
        self._saved_s = now_s
        return True

    def load(self) -> tuple[dict[ModelName, History], str]:
        """Return (the histories in this process's clock, one line if the file was unreadable and moved aside)."""
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_Histories)
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError) as error:
            moved = move_aside(self._path)
            return {}, f"{self._path} cannot be read ({error}): {moved}; the histories of models start empty"
        saved_s = self._clock() - max(0.0, self._wall() - file.saved_unix_s)
        return {name: _move(history, saved_s) for name, history in file.histories.items()}, ""


def _encode(history: History, now_s: float) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(_move(history, -now_s)))


def _move(history: History, by_s: float) -> History:
    moments = {name: (value + by_s) or -1e-9 for name in MOMENTS if (value := getattr(history, name))}
    return msgspec.structs.replace(history, **moments, **dict.fromkeys(FORGOTTEN, ()))


LESSON_VERSION: Final = 1
"""Version of the tables' meaning; files of other versions are ignored."""
LESSON_BYTES_MAX: Final = 32 << 20


class _Version(msgspec.Struct, frozen=True):
    version: int


class _LessonContent(msgspec.Struct, frozen=True):
    version: int
    lesson: PlacementValues


class LessonFile:
    """Stores the latest `PlacementValues`."""

    def __init__(self, state: StateDirectory) -> None:
        self._path = state.path / "lesson.json"

    def save(self, lesson: PlacementValues) -> None:
        """Write the values. Raises `OSError`."""
        replace_file(self._path, msgspec.json.encode(_LessonContent(LESSON_VERSION, lesson)))

    def load(self) -> tuple[PlacementValues | None, str]:
        """Return (the stored values, one line if they cannot be used). A broken file is moved aside."""
        try:
            with self._path.open("rb") as file:
                text = file.read(LESSON_BYTES_MAX)
            version = msgspec.json.decode(text, type=_Version).version
            if version != LESSON_VERSION:
                return None, f"{self._path} has version {version}, not {LESSON_VERSION}: its values are learned again"
            lesson = msgspec.json.decode(text, type=_LessonContent).lesson
            decode_placement_values(lesson)
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            return (
                None,
                f"{self._path} cannot be read ({error}): {move_aside(self._path)}; its values are learned again",
            )
        return lesson, ""
