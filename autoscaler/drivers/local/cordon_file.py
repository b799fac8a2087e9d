"""Operators' cordons of devices and nodes on one machine, in one file of the state directory. I/O.

STATE/cordons.json is replaced atomically and synced to disk before an order takes effect. Times are stored as Unix
seconds, because the monotonic clock restarts with each boot. An unreadable file is moved aside and reported, and then
nothing is cordoned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from autoscaler.drivers.driver import CordonError
from autoscaler.drivers.local.state_directory import StateDirectory, move_aside, replace_file
from autoscaler.state.events import CordonsSeen
from autoscaler.state.world import Cordon, CordonTarget, NodeId

CORDONS_MAX = 1000
"""Maximum number of cordons; more indicates a mistake."""

Observe = Callable[[tuple[CordonsSeen, ...]], None]


class Kept(msgspec.Struct, frozen=True):
    """One cordon as stored."""

    place: CordonTarget
    node: str
    since_unix_s: float
    drain: bool = False
    force: bool = False


class CordonFile:
    """The cordons of one machine. `clock` is the `World`'s monotonic clock; `wall` returns Unix seconds."""

    def __init__(
        self, state: StateDirectory, observe: Observe, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._path = state.path / "cordons.json"
        self._observe = observe
        self._clock = clock
        self._wall = wall
        self._cordons: dict[CordonTarget, Cordon] = {}
        self._writing = asyncio.Lock()

    def load(self) -> str:
        """Load and report the stored cordons. Return one line if the file was unreadable and moved aside."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=tuple[Kept, ...])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            return f"{self._path} cannot be read ({error}): {move_aside(self._path)}; all cordons are lost"
        self._cordons = {one.place: decode_cordon(one, self._clock() - self._wall()) for one in kept}
        self._report()
        return ""

    async def put(self, cordon: Cordon) -> None:
        """Store a cordon, as in `Cordons`."""
        async with self._writing:
            if cordon.place not in self._cordons and len(self._cordons) >= CORDONS_MAX:
                raise CordonError(f"{CORDONS_MAX} devices and nodes are already cordoned: uncordon some")
            await self._keep({**self._cordons, cordon.place: cordon})

    async def lift(self, place: CordonTarget) -> None:
        """Remove a cordon, as in `Cordons`."""
        async with self._writing:
            if place in self._cordons:
                await self._keep({other: one for other, one in self._cordons.items() if other != place})

    async def _keep(self, cordons: dict[CordonTarget, Cordon]) -> None:
        content = msgspec.json.encode([encode_cordon(one, self._wall() - self._clock()) for one in cordons.values()])
        try:
            await asyncio.to_thread(replace_file, self._path, content, durable=True)
        except OSError as error:
            raise CordonError(f"{self._path} cannot be written ({error.strerror})") from error
        self._cordons = cordons
        self._report()

    def _report(self) -> None:
        self._observe((CordonsSeen(cordons=tuple(self._cordons.values())),))


def encode_cordon(cordon: Cordon, to_unix_s: float) -> Kept:
    """Convert to the stored form; `to_unix_s` is added to times."""
    return Kept(cordon.place, cordon.node, cordon.since_s + to_unix_s, cordon.drain, cordon.force)


def decode_cordon(kept: Kept, from_unix_s: float) -> Cordon:
    """Convert to the `World`'s form; `from_unix_s` is added to times."""
    return Cordon(
        place=kept.place,
        node=NodeId(kept.node),
        since_s=kept.since_unix_s + from_unix_s,
        drain=kept.drain,
        force=kept.force,
    )
