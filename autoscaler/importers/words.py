"""A command line as a list of words from which flags are taken out by name. Pure.

Owns the two forms of a flag, `--flag value` and `--flag=value`. Of a flag that comes twice the last one holds, as in
every program whose flags are read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Words:
    """What is left of a command line."""

    def __init__(self, words: Iterable[str]) -> None:
        self.left = list(words)

    def take(self, *flags: str, when: Callable[[str], bool] = lambda _: True) -> str | None:
        """The value of a flag under any of its names, which is then gone; one that is not as `when` wants stays."""
        found: str | None = None
        position = 0
        while position < len(self.left):
            flag, equals, value = self.left[position].partition("=")
            if flag.replace("_", "-") in flags and not equals:
                value = self.left[position + 1] if position + 1 < len(self.left) else ""
            if flag.replace("_", "-") in flags and value and when(value):
                found = value
                del self.left[position : position + (1 if equals else 2)]
            else:
                position += 1
        return found

    def take_switch(self, *flags: str) -> bool:
        """Whether a flag without a value is there; it is gone then."""
        there = [word for word in self.left if word.replace("_", "-") in flags]
        self.left = [word for word in self.left if word not in there]
        return bool(there)

    def has(self, *flags: str) -> bool:
        """Whether a flag is there."""
        return any(word.partition("=")[0].replace("_", "-") in flags for word in self.left)
