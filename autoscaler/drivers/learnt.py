"""How long Offers of capacity took, and what became of them, across restarts: one file of the state directory. I/O.

Owns STATE/capacity.json, which is replaced whole. Another autoscaler of the same cluster has a file of its own, or
learns anew. A file that cannot be read is moved aside and told of in one line; then `expectedSeconds` counts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

import msgspec

from autoscaler.drivers.records import StateDirectory, move_aside, replace_file
from autoscaler.leases import GAPS_MAX, STARTS_MAX, Kind, Learnt

FILE_BYTES_MAX: Final = 4 << 20


class _Kept(msgspec.Struct, frozen=True):
    """Of one Kind. A gap of null is without end, for which JSON has no word."""

    kind: Kind
    took_s: tuple[float, ...]
    came: int
    failed: int
    gaps_s: tuple[float | None, ...]


class LearntFile:
    """Keeps what was learnt."""

    def __init__(self, state: StateDirectory) -> None:
        self._path = state.path / "capacity.json"
        self._saved: Mapping[Kind, Learnt] = {}

    def save(self, learnt: Mapping[Kind, Learnt]) -> None:
        """Writes it, if it is another than was written or read last. Raises OSError."""
        if learnt is self._saved or learnt == self._saved:
            return
        kept = [
            _Kept(kind, one.took_s, one.came, one.failed, tuple(None if gap == inf else gap for gap in one.gaps_s))
            for kind, one in learnt.items()
        ]
        replace_file(self._path, msgspec.json.encode(kept))
        self._saved = learnt

    def load(self) -> tuple[dict[Kind, Learnt], str]:
        """(what was kept; one line when the file was broken and moved aside)."""
        try:
            with self._path.open("rb") as file:
                kept = msgspec.json.decode(file.read(FILE_BYTES_MAX), type=list[_Kept])
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            return (
                {},
                f"{self._path} cannot be read ({error}): {move_aside(self._path)}; what Offers take is learnt again",
            )
        found = {
            one.kind: Learnt(
                took_s=one.took_s[-STARTS_MAX:], came=one.came, failed=one.failed,
                gaps_s=tuple(inf if gap is None else gap for gap in one.gaps_s[-GAPS_MAX:]),
            )
            for one in kept
        }  # fmt: skip
        self._saved = found
        return found, ""
