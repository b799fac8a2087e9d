"""Who may have a Copy that lies here already: what registries said lately, and for how long that counts. Pure.

Owns the memory of their answers. A Copy on the node must not be a way around the registry (kubernetes #18787): who asks
is judged by the registry, with a login of its own, before it gets the Copy. Promises: a no is remembered by nothing but
the loss of the yes before it; nobody is let in by another's yes; what is remembered is bounded. No login is kept.
"""

from __future__ import annotations

from artifacts.digests import Digest

FRESH_S = 300.0
"""So long a yes is not asked for again."""
AWAY_S_MAX = 86_400.0
"""So long a yes lets in while the registry does not answer, where that is wanted at all."""
PERMITS_MAX = 10_000

Asked = tuple[str, str, Digest]
"""The fingerprint of a login; the registry; the manifest."""


class Permits:
    """What was said, by `now_s`, monotonic seconds."""

    def __init__(self, fresh_s: float = FRESH_S, away_s: float = AWAY_S_MAX, most: int = PERMITS_MAX) -> None:
        self._fresh_s = fresh_s
        self._away_s = away_s
        self._most = most
        self._yes: dict[Asked, float] = {}
        """-> when; the oldest first."""

    def __len__(self) -> int:
        """How many answers are remembered."""
        return len(self._yes)

    def fresh(self, asked: Asked, now_s: float) -> bool:
        """The registry said yes so lately that it is not asked again."""
        return self._within(asked, now_s, self._fresh_s)

    def while_away(self, asked: Asked, now_s: float) -> bool:
        """The registry does not answer, and what it said before is enough."""
        return self._within(asked, now_s, self._away_s)

    def answered(self, asked: Asked, now_s: float, *, yes: bool) -> None:
        """The registry said so."""
        self._yes.pop(asked, None)
        if yes:
            self._yes[asked] = now_s
        while len(self._yes) > self._most:
            del self._yes[next(iter(self._yes))]

    def _within(self, asked: Asked, now_s: float, lasts_s: float) -> bool:
        said_s = self._yes.get(asked)
        return said_s is not None and now_s - said_s < lasts_s
