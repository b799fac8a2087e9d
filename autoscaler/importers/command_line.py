"""Reads command lines of other programs. Pure.

Flags are `--flag value` or `--flag=value`; of a repeated flag the last value applies.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable

_OPERATORS = re.compile(r"[;&|<>`$()]")


def split_command(text: str) -> list[str]:
    """Return the words of a command, as a shell splits it. Raises ValueError, for example for an open quote."""
    return shlex.split(text)


def unwrap_shell(words: list[str]) -> list[str]:
    """Return the words of the one program that `sh -c` starts, or the same words if the script does more."""
    shell, option, script = words if len(words) == 3 else ("", "", "")
    if shell.rpartition("/")[2] not in {"sh", "bash"} or option not in {"-c", "-lc", "-ec"}:
        return words
    if not script or _OPERATORS.search(script):
        return words
    try:
        return split_command(script.replace("\\\n", " "))
    except ValueError:
        return words


class CommandLine:
    """A command line from which flags are removed one by one."""

    def __init__(self, words: Iterable[str]) -> None:
        self.left = list(words)

    def take(self, *flags: str, when: Callable[[str], bool] = lambda _: True) -> str | None:
        """Remove a flag with any of these names and return its value. If `when` rejects the value, the flag stays."""
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
        """Remove a flag without a value; return whether it was present."""
        there = [word for word in self.left if word.replace("_", "-") in flags]
        self.left = [word for word in self.left if word not in there]
        return bool(there)

    def has(self, *flags: str) -> bool:
        """Whether a flag is present."""
        return any(word.partition("=")[0].replace("_", "-") in flags for word in self.left)
