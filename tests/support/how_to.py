"""Reads the how-to pages of the documentation."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"


def code_blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language on a page, in order, without the indentation of list items."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", (HOW_TO / page).read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]
