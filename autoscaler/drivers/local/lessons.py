"""Stores the learned placement values across restarts, in one file of the state directory. I/O.

STATE/lesson.json is replaced atomically. Each autoscaler of a cluster has its own file. An unreadable file, or one of
another version, is reported in one line, and the values are learned again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from autoscaler.drivers.local.state_directory import StateDirectory, move_aside, replace_file
from autoscaler.placement.learning.training import decode_placement_values
from autoscaler.state.placement_value import PlacementValues

VERSION: Final = 1
"""Version of the tables' meaning; files of other versions are ignored."""
FILE_BYTES_MAX: Final = 32 << 20


class _Version(msgspec.Struct, frozen=True):
    version: int


class _File(msgspec.Struct, frozen=True):
    version: int
    lesson: PlacementValues


class LessonFile:
    """Stores the latest `PlacementValues`."""

    def __init__(self, state: StateDirectory) -> None:
        self._path = state.path / "lesson.json"

    def save(self, lesson: PlacementValues) -> None:
        """Write the values. Raises `OSError`."""
        replace_file(self._path, msgspec.json.encode(_File(VERSION, lesson)))

    def load(self) -> tuple[PlacementValues | None, str]:
        """Return (the stored values, one line if they cannot be used). A broken file is moved aside."""
        try:
            with self._path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX)
            version = msgspec.json.decode(text, type=_Version).version
            if version != VERSION:
                return None, f"{self._path} has version {version}, not {VERSION}: its values are learned again"
            lesson = msgspec.json.decode(text, type=_File).lesson
            decode_placement_values(lesson)
        except FileNotFoundError:
            return None, ""
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            return (
                None,
                f"{self._path} cannot be read ({error}): {move_aside(self._path)}; its values are learned again",
            )
        return lesson, ""
