"""Every command of docs/tutorials belongs to a test that executes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tutorial import COMMANDS, CONTENT, ROOT, TUTORIALS, Reader, blocks, commands

PAGES = sorted(page.name for page in TUTORIALS.glob("*.md"))
PROGRAMS = re.compile(
    r"^(?:\$ |\w+=\S+ )*(?:\.venv/bin/)?(?:curl|helm|kubectl|make|pilotlight|python3?) ", re.MULTILINE
)
"""Matches a command in a block."""


def test_each_tutorial_is_followed_by_exactly_one_test() -> None:
    followed = [
        page
        for module in (ROOT / "tests" / "integration").rglob("test_tutorial*.py")
        for page in re.findall(r'\.following\("(.+?)"\)', module.read_text())
    ]
    assert sorted(followed) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_tutorial_test_that_executes_nothing_fails_naming_each_command(page: str, tmp_path: Path) -> None:
    """A test that executes nothing fails and names each command."""
    with pytest.raises(AssertionError) as failed, Reader(tmp_path).following(page):
        pass
    found = blocks((TUTORIALS / page).read_text())
    sessions = [command for session in found.get("console", []) for command in commands(session)]
    for command in (*found.get("sh", []), *sessions, *found.get("python", [])):
        assert command in str(failed.value)


def test_tutorial_test_that_omits_every_command_explicitly_passes(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    with reader.following("from-lingo.md") as page:
        reader.omit(*page["sh"], *(command for session in page["console"] for command in commands(session)))


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_tutorial_are_in_blocks_that_its_test_reads(page: str) -> None:
    """No block has an unknown language, is indented, or hides a command among documents and output."""
    text = (TUTORIALS / page).read_text()
    found = blocks(text)
    assert found.keys() <= {*COMMANDS, *CONTENT}
    assert len(re.findall(r"```|~~~", text)) == 2 * sum(len(contents) for contents in found.values())
    assert [one for language in CONTENT for one in found.get(language, []) if PROGRAMS.search(one)] == []
    for session in found.get("console", []):
        assert len(commands(session)) == len(re.findall(r"^\s*\$", session, re.MULTILINE)) > 0
