"""The product contains every message of docs/development/messages*.md in its revised form."""

from __future__ import annotations

import ast
import functools
import re
from typing import NamedTuple

import pytest

from scripts.gates import ROOT, SOURCES

PAGES = [ROOT / "docs" / "development" / f"messages{part}.md" for part in ("", "-operators")]
ROWS = 60
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (`+) ?(.+?) ?\3 \| (`+) ?(.+?) ?\5 \|$", re.MULTILINE)
_VALUE = re.compile(r"\{[A-Z]+\}")
BETWEEN = "\0"
"""Separates the texts of the product, and stands for the expressions of f-strings."""


class Row(NamedTuple):
    """One message of the page."""

    number: int
    code: str
    before: str
    after: str


def rows() -> list[Row]:
    """The rows of the tables."""
    found = [match for page in PAGES for match in _ROW.finditer(page.read_text())]
    return [Row(int(one[1]), one[2], one[4], one[6]) for one in found]


def fixed_parts(message: str) -> list[str]:
    """The parts of a message that are the same for all values; single characters of punctuation are omitted. A colon
    separates parts as well, because a reason can come from another place than the text before it.
    """
    parts = (part.strip(" ;:,'().-") for message in re.split(" -> |: ", message) for part in _VALUE.split(message))
    return [part for part in parts if part]


@functools.cache
def texts() -> str:
    """All strings of the product."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else BETWEEN for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return BETWEEN.join(found)


def test_messages_page_numbers_all_rows_and_each_text_was_revised() -> None:
    assert [row.number for row in rows()] == list(range(1, ROWS + 1))
    assert all(row.before != row.after for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.number}")
def test_product_contains_each_revised_message_of_the_page(row: Row) -> None:
    parts = fixed_parts(row.after)
    assert parts
    assert [part for part in parts if part not in texts()] == []


def test_fixed_parts_of_a_message_exclude_placeholders_and_separators() -> None:
    assert fixed_parts("{GPU} is lost: {ERROR} -> reset {GPU}; try again") == ["is lost", "reset", "try again"]
