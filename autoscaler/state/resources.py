"""What nodes have beside their Devices: CPU and memory, and what of that is left.

Owns the two records and their arithmetic. Amounts are thousandths of a core, and bytes. Knows no World.
"""

from __future__ import annotations

from typing import Final, NamedTuple

CPU_MAX: Final = 1 << 40
BYTES_MAX: Final = 1 << 50
"""More than any node has, and more bytes than any Slice: so much is also what a node has about which nothing is known.
"""
CORE: Final = 1000


class Beside(NamedTuple):
    """Amounts of a node's own."""

    cpu_milli: int = 0
    host_bytes: int = 0

    def holds(self, need: Beside) -> bool:
        """Whether `need` fits in. What is not asked for need not be there: a node may have less than nothing left."""
        return all(not asked or asked <= has for has, asked in zip(self, need, strict=True))

    def lack(self, need: Beside) -> Beside:
        """What of `need` does not fit in."""
        cpu_milli, host_bytes = (max(0, asked - has) if asked else 0 for has, asked in zip(self, need, strict=True))
        return Beside(cpu_milli, host_bytes)

    def plus(self, more: Beside) -> Beside:
        """Both together."""
        return Beside(self.cpu_milli + more.cpu_milli, self.host_bytes + more.host_bytes)

    def less(self, need: Beside) -> Beside:
        """What is left; below nothing where more is taken than there is."""
        return Beside(self.cpu_milli - need.cpu_milli, self.host_bytes - need.host_bytes)

    def most(self, other: Beside) -> Beside:
        """The larger of each."""
        return Beside(max(self.cpu_milli, other.cpu_milli), max(self.host_bytes, other.host_bytes))


NOTHING: Final = Beside()


class Host(NamedTuple):
    """What a node has beside its Devices, and what of that is left: in the World by pods of others, in a Yard by all.
    `coming` is held by those who leave, and promised to nobody.
    """

    cpu_milli: int = CPU_MAX
    host_bytes: int = BYTES_MAX
    cpu_left_milli: int = CPU_MAX
    left_bytes: int = BYTES_MAX
    coming: Beside = NOTHING

    @property
    def all(self) -> Beside:
        """Of an empty one."""
        return Beside(self.cpu_milli, self.host_bytes)

    @property
    def left(self) -> Beside:
        """Held by nobody, and promised to nobody."""
        return Beside(self.cpu_left_milli, self.left_bytes)

    @property
    def soon(self) -> Beside:
        """With what those have who leave."""
        return self.left.plus(self.coming)

    @property
    def cores_milli(self) -> int:
        """Its CPU in whole cores: what a system keeps for itself makes no two nodes differ."""
        return min(-(-self.cpu_milli // CORE) * CORE, CPU_MAX)

    def without(self, taken: Beside) -> Host:
        """`taken` is held by somebody."""
        return self.having(self.left.less(taken))

    def promised(self, need: Beside) -> Host:
        """To somebody: first of what is left, then of what is coming."""
        now = need.less(need.less(self.left.most(NOTHING)).most(NOTHING))
        return self.having(self.left.less(now))._replace(coming=self.coming.less(need.less(now)))

    def kept(self, stays: Beside) -> Host:
        """By who was to leave and stays: what is promised by now is of what else is coming or left."""
        rest = stays.less(self.coming).most(NOTHING)
        return self.having(self.left.less(rest))._replace(coming=self.coming.less(stays.less(rest)))

    def having(self, left: Beside) -> Host:
        """With so much left."""
        return self._replace(cpu_left_milli=left.cpu_milli, left_bytes=left.host_bytes)
